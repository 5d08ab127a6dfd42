"""`tqd events`: what happened to servers and configuration, and what happens next."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from daemon.cli.waiting import place
from daemon.errors import DaemonUnreachableError
from daemon.ops.events import EventJson, EventPage
from daemon.supervisor.client import Client

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings

WAIT_S = 30.0  # of one question to the daemon
RETRY_S = 1.0

_RESULTS = {
    "applied": "applied",
    "noop": "read again, nothing has changed",
    "rejected": "rejected; what runs is unchanged",
}


@click.command()
@click.option("-f", "--follow", "following", is_flag=True, help="Go on with what happens.")
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
@click.pass_obj
def events(settings: Settings, following: bool, as_json: bool) -> None:
    """Show what happened to servers and configuration since the daemon started.

    With -f it goes on, also when the daemon is restarted meanwhile.
    """
    client = Client(settings.state)
    with contextlib.suppress(KeyboardInterrupt):
        for event in _follow(client) if following else client.events(None)["events"]:
            click.echo(json.dumps(event, ensure_ascii=False) if as_json else line(event))


def _follow(client: Client) -> Iterator[EventJson]:
    page = client.events(None)
    while True:
        yield from page["events"]
        try:
            page = client.events(page["last"], WAIT_S)
        except DaemonUnreachableError:
            click.echo("tqd: the daemon does not answer; waiting for it", err=True)
            page = _next_page(client, page["last"])
        if page["missed"]:
            click.echo("tqd: some events were missed, or the daemon is another one now", err=True)


def _next_page(client: Client, last: str) -> EventPage:
    while True:
        time.sleep(RETRY_S)
        with contextlib.suppress(DaemonUnreachableError):
            return client.events(last)


def line(event: EventJson) -> str:
    """Return *event* for people."""
    at = datetime.fromisoformat(event["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return "\n".join([f"{at}  {_head(event)}", *(f"    {it}" for it in _details(event))])


def _head(event: EventJson) -> str:
    data: Any = event["data"]
    match event["event"]:
        case "server.changed":
            launch = f" (launch {data['launch']}, pid {data['pid']})" if data["pid"] else ""
            return f"{data['server']}: {data['from']} → {data['to']}{launch}"
        case "server.added":
            return f"{data['server']}: added"
        case "server.removed":
            return f"{data['server']}: removed"
        case "config.reloaded":
            return f"servers.yaml: {_RESULTS[data['result']]}"
        case "config.pending":
            return "servers.yaml: has changes that `tqd reload` applies"
        case _:
            return event["event"]


def _details(event: EventJson) -> Iterator[str]:
    data: Any = event["data"]
    if data.get("reason"):
        yield data["reason"]
    if data.get("hint"):
        yield f"hint: {data['hint']}"
    yield from data.get("steps", ())
    for problem in data.get("errors", ()):
        where = f"{problem['path']}: " if problem["path"] else ""
        yield f"{place(problem)}: {where}{problem['message']}"
        if problem["hint"]:
            yield f"  hint: {problem['hint']}"


COMMANDS: tuple[click.Command, ...] = (events,)
