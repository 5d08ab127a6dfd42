"""From a request and an architecture to the scheme of each layer, with reasons."""
