"""`tqd status --watch`: the table in place on a terminal, elsewhere a new one whenever something has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable

import click
from rich.console import Console, RenderableType
from rich.live import Live

from daemon.ops.document import Document

REFRESH_S = 1.0

Fetch = Callable[[], Document]
Draw = Callable[[Document], RenderableType]
Pause = Callable[[float], None]


def watch(fetch: Fetch, draw: Draw, console: Console, pause: Pause) -> None:
    """Show what *fetch* returns, each second, until it raises; the last table stays."""
    if not console.is_terminal:
        _print_changes(fetch, draw, console, pause)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(draw(fetch()), refresh=True)
            pause(REFRESH_S)


def watch_json(fetch: Callable[[], object], pause: Pause) -> None:
    """Print what *fetch* returns as a line of JSON, each second, until it raises."""
    while True:
        click.echo(json.dumps(fetch()))
        pause(REFRESH_S)


def _print_changes(fetch: Fetch, draw: Draw, console: Console, pause: Pause) -> None:
    shown: Hashable = None
    while True:
        document = fetch()
        if (seen := _essence(document)) != shown:
            shown = seen
            console.print(f"{document['now']}", draw(document), "", sep="\n")
        pause(REFRESH_S)


def _essence(document: Document) -> Hashable:
    """Return what makes another table worth printing: not ages, not counters."""
    servers = tuple(
        (it["name"], it["state"], it["reason"], it["pid"], it["restarts"]["total"])
        for it in document["servers"]
    )
    return servers, document["config"]["state"], document["daemon"]["state"]
