"""Prometheus metrics: which series there are, and how they are written."""
