"""Commands about servers.yaml that need no daemon: check, schema, init."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from daemon.cli.ports import look_at_ports
from daemon.cli.report import report
from daemon.cli.tables import print_report
from daemon.config.load import load
from daemon.config.machine import machine
from daemon.config.prepare import prepare
from daemon.config.schema import json_schema
from daemon.errors import ConfigError, TqdError
from daemon.supervisor import device, environment
from daemon.supervisor.client import Client

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings

DEFAULT_MODEL = "mlx-community/Qwen3-8B-4bit"

_NOBODY_ASKED = "no daemon of {} runs: ports of another daemon's workers count as taken, unless --state-dir names its folder"
_SAFE_PLAIN = re.compile(r"/?[A-Za-z0-9][\w.-]*(?:/[\w.-]+)+", re.ASCII)

_STARTING_FILE = """\
# yaml-language-server: $schema=./servers.schema.json
# `tqd check` says what this file means; `tqd schema > servers.schema.json` makes an editor complete it.

version: 1

servers:
  chat:
    # A hub id that is in the local Hugging Face cache, or the path of a folder.
    model: {model}
    port: 8081
    kv:
      # How the KV cache is kept: exact (16 bits) | quality | balanced | compact | small | extreme
      policy: balanced
    # api_key: ${{env:CHAT_API_KEY}}   # needed as soon as `host` is more than this machine
    # max_context: 32768              # tokens a sequence; default: the model's own
"""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def check(settings: Settings, as_json: bool) -> None:
    """Say what servers.yaml means: every server, every layer, every byte. Exits with 0 or 2."""
    try:
        here = machine(device.facts(settings.state, environment.inherited()))
        prepared = prepare(load(settings.config), state=settings.state, on=here)
    except ConfigError as error:
        if not as_json:
            raise
        problems = [asdict(problem) for problem in error.problems]
        click.echo(json.dumps({"ok": False, "problems": problems}, indent=2))
        sys.exit(error.exit_code)
    specs = {name: server.spec for name, server in prepared.servers.items()}
    running = Client(settings.state).status_if_running()
    ports = look_at_ports(specs, prepared.daemon, running)
    result = report(prepared, ports)
    if ports.servers and running is None:
        result = replace(
            result, warnings=(*result.warnings, _NOBODY_ASKED.format(settings.state.root))
        )
    if as_json:
        click.echo(json.dumps(result.document(), indent=2))
    else:
        print_report(result)
    sys.exit(0 if result.ok else ConfigError.exit_code)


@click.command()
def schema() -> None:
    """Print the JSON Schema of servers.yaml, for editors."""
    click.echo(json.dumps(json_schema(), indent=2))


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--model", default=DEFAULT_MODEL, help="Hub id or folder of the first server's model."
)
@click.pass_context
def init(context: click.Context, file: Path | None, model: str) -> None:
    """Write a small servers.yaml to start from [default: ./servers.yaml]; never overwrites one."""
    target = file or context.find_root().params.get("config") or Path("servers.yaml")
    text = _STARTING_FILE.format(model=_yaml_text(_model_for(model)))
    try:
        # a key may be written into it later, so nobody else reads it
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise TqdError(f"{target} exists", hint="name another file: tqd init FILE") from None
    except OSError as error:
        raise TqdError(f"{target} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text)
    click.echo(f"wrote {target}; `tqd -c {target} check` says what it means")


def _model_for(model: str) -> str:
    """Return *model* as the file should name it: a folder given on the command line is absolute there."""
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", ".", "~"))
    if path.is_dir():
        return str(path.absolute())
    if looks_like_path:
        raise TqdError(f"there is no folder {model}", hint="--model takes a folder or a hub id")
    return model


def _yaml_text(text: str) -> str:
    """Return *text* as a YAML value that means exactly it; JSON's quotes are YAML's."""
    escaped = text.replace("${", "$${")
    return escaped if _SAFE_PLAIN.fullmatch(escaped) else json.dumps(escaped, ensure_ascii=False)


COMMANDS: tuple[click.Command, ...] = (check, schema, init)
