"""Wire formats of the HTTP API: requests in, responses and events out."""
