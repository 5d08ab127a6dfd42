"""Measurements of quality, bytes and speed; run in a process of their own."""
