"""Commands that show what runs: status, logs, diff."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import RenderableType

from daemon.cli.completion import servers
from daemon.cli.following import Log
from daemon.cli.status_table import detail, overview
from daemon.cli.tables import console
from daemon.cli.waiting import by_name
from daemon.errors import DaemonUnreachableError, NotRunningError, TqdError, UnknownServerError
from daemon.ops.document import Document, ServerStatus
from daemon.supervisor.client import Client
from daemon.units import parse_duration

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings

POLL_S = 0.25
DEFAULT_LINES = 50
_PROCESS_STATES = ("ready", "degraded", "loading", "starting", "draining", "stopping")


def _moment(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """Return what *value* means: so long ago, or a time, local unless it says."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return datetime.now(UTC) - timedelta(seconds=parse_duration(value))
    try:
        return datetime.fromisoformat(value).astimezone()
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a duration such as 10m nor a time such as 2026-01-31T08:00",
            ctx,
            param,
        ) from None


@click.command()
@click.argument("name", required=False, shell_complete=servers)
@click.option("--json", "as_json", is_flag=True, help="Print the document of GET /v1/status.")
@click.option("-w", "--watch", is_flag=True, help="Refresh until interrupted.")
@click.pass_obj
def status(settings: Settings, name: str | None, as_json: bool, watch: bool) -> None:
    """Show every server, or everything about one; exit code 3 when that one does not run."""
    client = Client(settings.state)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(client, name, as_json=as_json)
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


def _watch(client: Client, name: str | None, *, as_json: bool) -> None:
    from daemon.cli import watching  # only here

    def draw(document: Document) -> RenderableType:
        return overview(document) if name is None else detail(_server(document, name), document)

    def fetch() -> object:
        document = client.status()
        return document if name is None else _server(document, name)

    client.status()  # a daemon that never ran is another message than one that went away
    try:
        if as_json:
            watching.watch_json(fetch, time.sleep)
        else:
            watching.watch(client.status, draw, console(), time.sleep)
    except DaemonUnreachableError as error:
        raise DaemonUnreachableError("the daemon has gone", hint=error.hint) from error


@click.command()
@click.argument("name", shell_complete=servers)
@click.option("-f", "--follow", "following", is_flag=True, help="Go on with what is added.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    help="The last so many lines, rotated files included [default: 50, or all with --since].",
)
@click.option(
    "--since",
    metavar="AGO|TIME",
    callback=_moment,
    help="From then on: 10m, 2h, or a time such as 2026-01-31T08:00 (local, unless it says).",
)
@click.pass_obj
def logs(
    settings: Settings, name: str, following: bool, lines: int | None, since: datetime | None
) -> None:
    """Show what the workers of a server wrote; every launch begins with a marker line."""
    path = _log_path(settings, name)
    with contextlib.suppress(KeyboardInterrupt):
        while following and not path.exists():
            time.sleep(POLL_S)
        try:
            log = Log(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise TqdError(
                    f"{name} has written no log yet ({path})",
                    hint=f"`tqd status {name}` says whether it was ever started",
                ) from error
            raise TqdError(f"the log of {name} cannot be read: {path}: {error.strerror}") from error
        with log:
            _write(_chosen(log, lines, since))
            for data in log.follow() if following else ():
                _write([data])


def _chosen(log: Log, count: int | None, since: datetime | None) -> Iterable[bytes]:
    if since is None:
        return log.last(DEFAULT_LINES if count is None else count)
    found = log.since(since)
    return found if count is None else deque(found, maxlen=count)


def _write(parts: Iterable[bytes]) -> None:
    sys.stdout.buffer.writelines(parts)
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
        raise UnknownServerError.among(servers, name, document["config"]["state"])
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
