"""The codec and attention over packed keys and values."""
