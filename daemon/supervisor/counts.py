"""Count what happens to servers, from what changes between two turns of the reconciler.

The counts are for metrics: nothing is decided by them. They stay when a server leaves the file, so that
one that comes back goes on counting.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from daemon.metrics import catalogue
from daemon.metrics.histogram import Observations
from daemon.supervisor.server import Server, State

RestartReason = Literal["crash", "oom", "probe", "config", "manual"]

# States in which a server whose worker has ended is to have another one.
_TO_START_AGAIN = frozenset({State.STARTING, State.BACKOFF})
_FOR_MEMORY = frozenset({"insufficient_memory", "memory"})
_PROBES = frozenset({"stalled", "load_stalled", "spawn_timeout"})


@dataclass(slots=True)
class ServerCounts:
    """The counts of one server since the daemon started."""

    restarts: Counter[RestartReason] = field(default_factory=Counter)
    probe_failures: int = 0
    load_s: Observations = field(default_factory=lambda: Observations(catalogue.LOAD_S))


class Counts:
    """The counts of all servers."""

    def __init__(self) -> None:
        self.refused_for_memory: Counter[str] = Counter()
        """Starts that were refused, by the code of the cause."""
        self._servers: dict[str, ServerCounts] = {}

    def of(self, name: str) -> ServerCounts:
        """Return the counts of server *name*; zeros before anything happened."""
        return self._servers.setdefault(name, ServerCounts())

    def changed(self, before: Server, after: Server) -> None:
        """Count what lies between *before* and *after*, two moments of one server."""
        counts = self.of(after.name)
        if (reason := restart_reason(before, after)) is not None:
            counts.restarts[reason] += 1
        if probe_failed(before, after):
            counts.probe_failures += 1
        cause, worker = after.cause, after.worker
        earlier = before.cause.code if before.cause else None
        if cause is not None and cause.code != earlier and cause.code in _FOR_MEMORY:
            self.refused_for_memory[cause.code] += 1
        if worker is not None and worker.ready_at is not None and before.state is State.LOADING:
            counts.load_s.observe(worker.ready_at - worker.started_at)


def restart_reason(before: Server, after: Server) -> RestartReason | None:
    """Return why the worker of *before* is to be followed by another one; None: it is not, or not yet."""
    ended = before.worker
    if ended is None or after.worker is not None or after.state not in _TO_START_AGAIN:
        return None
    if ended.ending in _PROBES:
        return "probe"
    match ended.ending:
        case "replace":
            return "config"
        case "stop" | "restart":
            return "manual"
        case _:
            exit_ = after.last_exit
            killed = exit_ is not None and exit_.classified == "killed_external"
            return "oom" if killed else "crash"


def probe_failed(before: Server, after: Server) -> bool:
    """Whether a probe of *before*'s worker has just failed; a stall counts once, when it is noticed."""
    if after.state is State.DEGRADED and before.state is State.READY:
        return True
    worker, earlier = after.worker, before.worker
    return (
        worker is not None
        and earlier is not None
        and earlier.ending is None
        and worker.ending in ("load_stalled", "spawn_timeout")
    )
