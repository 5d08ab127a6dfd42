"""The child process: one model, one MLX thread, one HTTP server."""
