"""The `tqd` command: the group, the options every command shares, and what a failure looks like."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from daemon import paths
from daemon.cli import (
    completion,
    configuration,
    doctor,
    evaluation,
    events,
    lifecycle,
    observing,
    pulling,
    service,
)
from daemon.cli import demo as demo_commands
from daemon.errors import TqdError


class Group(click.Group):
    """Turns every TqdError into one message on stderr and its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a user's situation never shows a traceback."""
        try:
            return super().invoke(ctx)
        except TqdError as error:
            fail(error)


def fail(error: TqdError) -> NoReturn:
    """Print *error* and exit with its code."""
    click.echo(f"tqd: {error}", err=True)
    sys.exit(error.exit_code)


@click.group(
    cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    help="servers.yaml to use [default: $TQD_CONFIG, ./servers.yaml].",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="State folder [default: $TQD_STATE_DIR, the platform's].",
)
@click.version_option(importlib.metadata.version("tqd"), prog_name="tqd")
@click.pass_context
def main(ctx: click.Context, config: Path | None, state_dir: Path | None) -> None:
    """Serve MLX language models from one declarative file."""
    ctx.obj = Settings(config, state_dir)


class Settings:
    """The shared options, resolved when a command needs them."""

    def __init__(self, config: Path | None, state_dir: Path | None) -> None:
        self._config = config
        self._state_dir = state_dir

    @property
    def config(self) -> Path:
        """The servers.yaml to use; it may not exist."""
        return paths.config_file(self._config)

    @property
    def state(self) -> paths.StateDir:
        """The state folder of the daemon that this command talks to."""
        return paths.state_dir(self._state_dir)


for module in (
    configuration,
    lifecycle,
    observing,
    events,
    service,
    pulling,
    doctor,
    evaluation,
    demo_commands,
    completion,
):
    for command in module.COMMANDS:
        main.add_command(command)
