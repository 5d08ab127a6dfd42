"""Which KV-cache scheme each layer gets, and what that costs: pure functions over plain data."""
