"""What a policy costs in bytes."""
