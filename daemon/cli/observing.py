"""Commands that show what runs: status, logs, diff."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from daemon.cli.following import follow, last_lines
from daemon.cli.status_table import detail, overview
from daemon.cli.tables import console
from daemon.cli.waiting import by_name
from daemon.errors import DaemonUnreachableError, NotRunningError, TqdError, UnknownServerError
from daemon.ops.document import Document, ServerStatus
from daemon.supervisor.client import Client

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings

REFRESH_S = 1.0
POLL_S = 0.25
_PROCESS_STATES = ("ready", "degraded", "loading", "starting", "draining", "stopping")


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the document of GET /v1/status.")
@click.option("-w", "--watch", is_flag=True, help="Refresh until interrupted.")
@click.pass_obj
def status(settings: Settings, name: str | None, as_json: bool, watch: bool) -> None:
    """Show every server, or everything about one; exit code 3 when that one does not run."""
    client = Client(settings.state)
    if watch and not as_json:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(client, name)
        return
    document = client.status()
    server = None if name is None else _server(document, name)
    if as_json:
        click.echo(json.dumps(document if server is None else server, indent=2))
    elif server is None:
        console().print(overview(document))
    else:
        console().print(detail(server, document))
    if server is not None and server["state"] not in _PROCESS_STATES:
        sys.exit(NotRunningError.exit_code)


def _watch(client: Client, name: str | None) -> None:
    from rich.live import Live  # only here

    with Live(console=console(), auto_refresh=False) as live:
        while True:
            document = client.status()
            shown = (
                overview(document) if name is None else detail(_server(document, name), document)
            )
            live.update(shown, refresh=True)
            time.sleep(REFRESH_S)


@click.command()
@click.argument("name")
@click.option("-f", "--follow", "following", is_flag=True, help="Go on with what is added.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True)
@click.pass_obj
def logs(settings: Settings, name: str, following: bool, lines: int) -> None:
    """Show what the workers of a server wrote; every launch begins with a marker line."""
    path = _log_path(settings, name)
    with contextlib.suppress(KeyboardInterrupt):
        _show_log(name, path, lines, following=following)


def _show_log(name: str, path: Path, lines: int, *, following: bool) -> None:
    while following and not path.exists():
        time.sleep(POLL_S)
    try:
        file = path.open("rb")
    except OSError as error:
        raise TqdError(f"there is no log of {name} yet ({path}): {error.strerror}") from error
    with file:
        _write(last_lines(file, lines))
        for data in follow(path, file) if following else ():
            _write(data)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the steps as JSON.")
@click.pass_obj
def diff(settings: Settings, as_json: bool) -> None:
    """Show what `tqd reload` would do, and do nothing."""
    steps = Client(settings.state).diff()
    if as_json:
        click.echo(json.dumps({"steps": steps}, indent=2))
    for step in () if as_json else steps:
        click.echo(step["text"])
    if not steps and not as_json:
        click.echo("nothing would change")


def _server(document: Document, name: str) -> ServerStatus:
    servers = by_name(document)
    if name not in servers:
        hint = f"one of {', '.join(servers)}" if servers else "there is none in servers.yaml"
        raise UnknownServerError(f'no server is called "{name}"', hint=hint)
    return servers[name]


def _log_path(settings: Settings, name: str) -> Path:
    """Return the log of server *name*; without a daemon, where it is by default."""
    try:
        return Path(_server(Client(settings.state).status(), name)["log_path"])
    except DaemonUnreachableError:
        if Path(name).name != name:
            raise UnknownServerError(f'"{name}" is no name of a server') from None
        return settings.state.server_log(name)


COMMANDS: tuple[click.Command, ...] = (status, logs, diff)
