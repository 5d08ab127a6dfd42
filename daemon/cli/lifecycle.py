"""Commands that change what runs: run, shutdown, start, stop, restart, reload."""

from __future__ import annotations

import click

COMMANDS: tuple[click.Command, ...] = ()
