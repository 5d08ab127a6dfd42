"""The parent process: keeps the workers equal to servers.yaml. Never imports MLX."""
