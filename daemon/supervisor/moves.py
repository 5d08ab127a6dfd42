"""The moves that decisions about a server are made of."""

from __future__ import annotations

from dataclasses import replace

from daemon.supervisor.events import Effect
from daemon.supervisor.server import NO_MEMORY, Cause, Server, State, Worker

RECHECK_S = 5.0  # how often a port that blocks a server is tried again
RECHECK_FILES_S = 30.0  # how often missing files are looked for; that reads every model's headers

Result = tuple[Server, tuple[Effect, ...]]


def enter(server: Server, state: State, now: float) -> Server:
    """Return *server* as it enters *state*, with nothing to say about it yet."""
    return replace(server, state=state, since=now, cause=None, attempt_at=None)


def with_worker(server: Server, worker: Worker) -> Server:
    """Return *server* with *worker* for its worker."""
    return replace(server, worker=worker)


def forgive(server: Server) -> Server:
    """Return *server* with no failures counted against it."""
    return replace(server, failures=0, restarts=())


def queue(server: Server, now: float) -> Result:
    """Let *server* wait for its turn to be launched."""
    return enter(server, State.STARTING, now), ()


def block(server: Server, cause: Cause, now: float) -> Server:
    """Return *server* blocked for *cause*, and when that is looked at again."""
    if server.state is not State.BLOCKED:
        server = enter(server, State.BLOCKED, now)
    later = None if cause.code == NO_MEMORY else now + recheck_s(cause)
    return replace(server, cause=cause, attempt_at=later)


def recheck_s(cause: Cause | None) -> float:
    """Return how long after a look at what blocks a server the next one comes."""
    return RECHECK_S if cause is not None and cause.code == "port_in_use" else RECHECK_FILES_S
