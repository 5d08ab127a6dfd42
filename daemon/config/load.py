"""From the text of servers.yaml to frozen specs, with a place for every problem."""
