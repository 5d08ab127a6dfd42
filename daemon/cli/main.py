"""The `tqd` command: the group, the options every command shares, and what a failure looks like."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from daemon import paths
from daemon.errors import TqdError

# Modules of commands, imported when one of theirs is used: `tqd status` must not wait for what reads
# configurations and models.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "configuration": ("check", "schema", "init"),
    "lifecycle": ("run", "shutdown", "start", "stop", "restart", "reload"),
    "observing": ("status", "logs", "diff"),
    "events": ("events",),
    "service": ("service",),
    "pulling": ("pull",),
    "doctor": ("doctor", "version"),
    "completion": ("completion",),
    "evaluation": ("eval", "advise"),
    "demo": ("demo-model",),
}


class Group(click.Group):
    """Finds commands in their modules, and turns every TqdError into one message and its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the name of every command."""
        return sorted(name for names in FAMILIES.values() for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name; None when there is none."""
        for family, names in FAMILIES.items():
            if cmd_name in names:
                module = importlib.import_module(f"daemon.cli.{family}")
                commands: Sequence[click.Command] = module.COMMANDS
                return next(it for it in commands if it.name == cmd_name)
        return None

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
    help="servers.yaml to use [default: $TQD_CONFIG, ./servers.yaml, the one in the user's"
    " configuration folder].",
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
    def names_config(self) -> bool:
        """Whether a servers.yaml is named or in the current folder, rather than the user's default one."""
        return self.config != paths.default_config_file()

    @property
    def state(self) -> paths.StateDir:
        """The state folder of the daemon that this command talks to."""
        return paths.state_dir(self._state_dir)
