"""Commands that show what runs: status, logs, diff."""

from __future__ import annotations

import click

COMMANDS: tuple[click.Command, ...] = ()
