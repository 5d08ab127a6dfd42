"""`python -m daemon` is the tqd command."""

from daemon.cli.main import main

main(prog_name="tqd")
