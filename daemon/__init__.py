"""tqd: a declarative inference daemon for MLX language models (the distribution is named tqd, see ADR 0001)."""
