"""From the text of servers.yaml to frozen specs, and from two specs to their difference."""
