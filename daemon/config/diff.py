"""The difference between two prepared configurations, as steps."""
