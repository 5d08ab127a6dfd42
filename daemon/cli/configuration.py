"""Commands about servers.yaml that need no daemon: check, schema, init."""

from __future__ import annotations

import click

COMMANDS: tuple[click.Command, ...] = ()
