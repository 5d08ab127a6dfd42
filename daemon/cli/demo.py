"""The demo-model command."""

from __future__ import annotations

import click

COMMANDS: tuple[click.Command, ...] = ()
