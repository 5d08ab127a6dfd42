"""launchd, systemd and the notify protocol."""
