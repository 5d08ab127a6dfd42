"""What the supervisor shows to operators: status document, events, metrics."""
