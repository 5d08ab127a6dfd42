"""Wait until servers are what a command asked for, and show how far they are."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.console import Console

from daemon.errors import InProgressError, TqdError
from daemon.ops.document import DivergentStatus, Document, ProblemStatus, ServerStatus
from daemon.supervisor.client import Client
from daemon.supervisor.messages import Action

POLL_S = 0.2
RETRY_HINT = "correct servers.{0}, or try it again as it is with `tqd restart {0}`"

Outcome = Literal["done", "failed", "waiting"]


def wait(client: Client, action: Action, before: Mapping[str, int], timeout_s: float) -> None:
    """Return once every server of *before* (name → launch at the time of asking) is where *action* leads.

    Raises:
        TqdError: a server cannot get there, and no other is still on its way; says why, with its last
            lines of output.
        InProgressError: the time is up, and it still goes on.
    """
    until = time.monotonic() + timeout_s
    with _Progress() as progress:
        while True:
            document = client.status()
            servers = by_name(document)
            _refuse_rolled_back(document["config"]["divergent"], servers, before)
            outcomes = {name: outcome(action, servers.get(name), before[name]) for name in before}
            gone = [name for name, it in outcomes.items() if it == "failed" and name not in servers]
            if gone:
                raise TqdError(f"{', '.join(gone)} is no longer in servers.yaml")
            failed = [servers[name] for name, it in outcomes.items() if it == "failed"]
            waiting = [name for name, it in outcomes.items() if it == "waiting"]
            late = time.monotonic() >= until
            if failed and (late or not waiting):
                still = [f"{name} is still {servers[name]['state']}" for name in waiting]
                raise TqdError(
                    "; ".join(["\n".join(map(failure, failed)), *still]), hint=_hint(failed)
                )
            if not waiting:
                return
            progress.show([servers[name] for name in (*(it["name"] for it in failed), *waiting)])
            if late:
                states = ", ".join(f"{name} is {servers[name]['state']}" for name in waiting)
                raise InProgressError(
                    f"not done after {timeout_s:.0f} s: {states}",
                    hint="it goes on; `tqd status` shows how far it is",
                )
            time.sleep(POLL_S)


def _refuse_rolled_back(
    found: Sequence[DivergentStatus],
    servers: Mapping[str, ServerStatus],
    before: Mapping[str, int],
) -> None:
    """Raise TqdError when a server of *before* was launched since, and went back to its previous section."""
    for divergent in found:
        name = divergent["server"]
        if name in before and name in servers and servers[name]["launch"] > before[name]:
            hint = divergent["hint"] or RETRY_HINT.format(name)
            raise TqdError(rolled_back(divergent), hint=hint)


def rolled_back(divergent: DivergentStatus) -> str:
    """Return in a line that a server runs its previous section, and why."""
    return (
        f"{divergent['server']} went back to its previous section; the new one did not become ready: "
        f"{divergent['reason']}"
    )


def outcome(action: Action, server: ServerStatus | None, launch_before: int) -> Outcome:
    """Return how far *server* is; None is one that is no longer in servers.yaml."""
    if server is None:
        return "done" if action == "stop" else "failed"
    state = server["state"]
    if action == "stop":
        return "done" if state == "stopped" else "waiting"
    if state == "ready":
        fresh = action == "start" or server["launch"] > launch_before
        return "done" if fresh else "waiting"
    return "failed" if state in ("failed", "blocked", "stopped") else "waiting"


def reason(server: ServerStatus) -> str:
    """Return why *server* does not run, in a line."""
    text = f"{server['name']} is {server['state']}"
    if server["reason"]:
        text += f": {server['reason']}"
    last = server["last_exit"]
    if server["state"] == "failed" and last is not None:
        code = last["code"]
        how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        text += f" (the last worker ended with {how})"
    return text


def failure(server: ServerStatus) -> str:
    """Return why *server* does not run, with the last lines that its worker wrote."""
    last = server["last_exit"]
    if server["state"] not in ("failed", "backoff") or last is None:
        return reason(server)
    lines = [line for written in last["tail"] for line in _readable(written)]
    return "\n  ".join([reason(server), *lines])


def _readable(line: str) -> list[str]:
    """Return a line of a worker's log as people read it: JSON opened up, a traceback on lines of its own."""
    try:
        entry = json.loads(line)
        event, level = entry.pop("event"), entry.pop("level")
    except (ValueError, AttributeError, KeyError):
        return [line]
    traceback = str(entry.pop("exception", "")).splitlines()
    moment = entry.pop("timestamp", "")
    fields = " ".join(f"{key}={value}" for key, value in entry.items())
    return [f"{moment} {level} {event} {fields}".strip(), *(f"  {part}" for part in traceback)]


def place(problem: ProblemStatus) -> str:
    """Return where *problem* is; one of the whole file has no line."""
    if not problem["line"]:
        return problem["file"]
    return f"{problem['file']}:{problem['line']}:{problem['col']}"


def by_name(document: Document) -> dict[str, ServerStatus]:
    """Return the servers of *document* by name."""
    return {server["name"]: server for server in document["servers"]}


def _hint(servers: Sequence[ServerStatus]) -> str:
    hints = dict.fromkeys(server["hint"] for server in servers if server["hint"])
    return "; ".join(hints) or f"`tqd logs {servers[0]['name']}` shows all it wrote"


class _Progress:
    """One line that changes in place on a terminal; one line per change elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("")
        self._shown = ""

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def show(self, servers: Sequence[ServerStatus]) -> None:
        if sys.stderr.isatty():
            self._status.update(", ".join(map(_describe, servers)))
            return
        states = ", ".join(f"{server['name']} {server['state']}" for server in servers)
        if states != self._shown:
            self._shown = states
            self._console.print(states)


def _describe(server: ServerStatus) -> str:
    progress = server["load_progress"]
    text = f"{server['name']} {server['state']}"
    return text if progress is None else f"{text} {progress:.0%}"
