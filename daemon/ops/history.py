"""What became of each server and of each reading of servers.yaml: the last few, and an event for each.

The reconciler and the configuration report here; nothing is decided here.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, TypedDict, cast

from daemon.log import get_logger
from daemon.ops.document import ProblemStatus, moment, problem_status
from daemon.ops.events import EventLog, EventName
from daemon.supervisor.conclusions import Conclusion
from daemon.supervisor.files import read_json, write_private
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import Cause, Server

TRANSITIONS = 20  # of each server: a whole crash loop with its end
RELOADS = 20

Change = TypedDict(
    "Change",
    {
        "from": str,
        "to": str,
        "reason": str | None,
        "reason_code": str | None,
        "hint": str | None,
        "launch": int,
        "pid": int | None,
        "exit_code": int | None,
    },
)
Change.__doc__ = """What changed about a server. *from* is ``absent`` for a new one, and equal to *to* where only the reason
changed; *exit_code* is that of the worker whose end this is."""


class Transition(Change):
    """A change of a server, and when."""

    at: str


class Outcome(TypedDict):
    """What became of one reading of servers.yaml."""

    result: Literal["applied", "noop", "rejected"]
    generation: int
    steps: list[str]
    errors: list[ProblemStatus]
    warnings: list[str]


class Reload(Outcome):
    """A reading of servers.yaml, and when."""

    at: str


class HistoryDocument(TypedDict):
    """The document of ``GET /v1/history``, oldest first."""

    servers: Mapping[str, Sequence[Transition]]
    reloads: Sequence[Reload]


class History:
    """The last changes of each server, and the last reloads, which *path* keeps for the next daemon."""

    def __init__(self, log: EventLog, path: Path, wall: Callable[[], datetime]) -> None:
        self._log = log
        self._path = path
        self._wall = wall
        self._servers: dict[str, deque[Transition]] = {}
        self._reloads = deque(_kept(path), maxlen=RELOADS)

    def document(self) -> HistoryDocument:
        """Return everything that is kept."""
        servers = {name: list(it) for name, it in self._servers.items()}
        return {"servers": servers, "reloads": list(self._reloads)}

    def server(self, name: str) -> Sequence[Transition]:
        """Return the last changes of server *name*."""
        return list(self._servers.get(name, ()))

    def fleet_changed(self, before: Fleet, after: Fleet) -> None:
        """Record what a turn of the reconciler has changed."""
        for name in (name for name in after.servers if name not in before.servers):
            self._servers[name] = deque(maxlen=TRANSITIONS)
            self._tell("server.added", {"server": name})
        for name, change in changes(before, after):
            at = self._tell("server.changed", {"server": name, **change})
            self._servers[name].append({"at": at, **change})
        for name in (name for name in before.servers if name not in after.servers):
            del self._servers[name]
            self._tell("server.removed", {"server": name})
        if after.closing and not before.closing:
            self._tell("daemon.stopping", {})

    def reloaded(self, conclusion: Conclusion) -> None:
        """Record what became of a reading of servers.yaml."""
        outcome: Outcome = {
            "result": conclusion.result,
            "generation": conclusion.generation,
            "steps": [str(step) for step in conclusion.steps],
            "errors": [problem_status(it) for it in conclusion.problems],
            "warnings": [str(it) for it in conclusion.warnings],
        }
        at = self._tell("config.reloaded", {**outcome})
        self._reloads.append({"at": at, **outcome})
        self._keep()

    def pending(self, steps: Sequence[str]) -> None:
        """Record that the file has changes which wait for `tqd reload`."""
        self._tell("config.pending", {"steps": list(steps)})

    def _tell(self, name: EventName, data: Mapping[str, object]) -> str:
        """Publish an event of this moment; return the moment."""
        at = moment(self._wall())
        self._log.publish(name, at, data)
        return at

    def _keep(self) -> None:
        try:
            write_private(self._path, json.dumps(list(self._reloads), indent=1).encode())
        except OSError as error:  # the history of this daemon goes on without
            get_logger().error("state.not_written", path=str(self._path), error=error.strerror)


def changes(before: Fleet, after: Fleet) -> Iterator[tuple[str, Change]]:
    """Yield every server whose state, or the reason for it, is another one in *after*, or that was rolled back."""
    for name, server in after.servers.items():
        earlier = before.servers.get(name)
        if earlier is server:
            continue
        if (
            earlier is None
            or earlier.state is not server.state
            or _code(earlier) != _code(server)
            or _rolled_back(earlier, server) is not None
        ):
            yield name, _change(earlier, server)


def _rolled_back(before: Server | None, after: Server) -> Cause | None:
    """Return why *after* went back to its previous section just now; None when it did not."""
    divergence = after.divergence
    if divergence is None or (before is not None and divergence is before.divergence):
        return None
    why = divergence.cause
    message = f"went back to its previous section; the new one did not become ready: {why.message}"
    return Cause(why.code, message, why.hint)


def _change(before: Server | None, after: Server) -> Change:
    cause = after.cause or _rolled_back(before, after)
    worker = after.worker or (before.worker if before else None)
    ended = before is not None and after.last_exit is not before.last_exit
    return {
        "from": str(before.state) if before else "absent",
        "to": str(after.state),
        "reason": cause.message if cause else None,
        "reason_code": cause.code if cause else None,
        "hint": cause.hint if cause else None,
        "launch": after.launches,
        "pid": worker.pid if worker else None,
        "exit_code": after.last_exit.code if ended and after.last_exit else None,
    }


def _code(server: Server) -> str | None:
    return server.cause.code if server.cause else None


def _kept(path: Path) -> list[Reload]:
    """Return the reloads of earlier daemons; what is no list of them counts as none."""
    found = read_json(path)
    entries = found if isinstance(found, list) else []
    keys = Reload.__annotations__.keys()
    return [cast("Reload", it) for it in entries if isinstance(it, dict) and it.keys() >= keys]
