"""KV caches for mlx-lm models: token order, sinks, packed pages, tail."""
