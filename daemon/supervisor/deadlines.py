"""What time does to a server: workers that stand still, drains and graces that end, delays that are over."""

from __future__ import annotations

from dataclasses import replace

from daemon.supervisor import ending, exits, moves
from daemon.supervisor.events import Recheck, SendSignal
from daemon.supervisor.moves import Result
from daemon.supervisor.server import Cause, Server, State, Worker

STALLED_JUDGEMENTS = 3  # a degraded worker gets this many probe intervals to move again


def wake_at(server: Server) -> float | None:
    """Return when *server* next needs a `Tick`, or None."""
    worker = server.worker
    match server.state:
        case State.STARTING:
            return worker.moved_at + exits.SPAWN_TIMEOUT_S if worker and worker.pid else None
        case State.LOADING if worker:
            return worker.moved_at + server.spec.probe.load_stall
        case State.READY if worker:
            stalled_at = worker.moved_at + server.spec.probe.stall
            return min(stalled_at, _stable_at(server)) if server.restarts else stalled_at
        case State.DEGRADED if worker:
            return _replace_stalled_at(server, worker)
        case State.DRAINING | State.STOPPING if worker:
            return worker.deadline
        case State.BACKOFF | State.BLOCKED:
            return server.attempt_at
        case _:
            return None


def tick(server: Server, now: float) -> Result:
    """Do what is due at *now*."""
    if server.state is State.READY and server.restarts and now >= _stable_at(server):
        server = moves.forgive(server)
    due = wake_at(server)
    if due is None or now < due:
        return server, ()
    worker = server.worker
    match server.state:
        case State.STARTING if worker:
            return ending.end(server, worker, "spawn_timeout", now)
        case State.LOADING if worker:
            return ending.end(server, worker, "load_stalled", now)
        case State.READY:
            silent = Cause("stalled", "the engine's loop has not moved")
            return replace(moves.enter(server, State.DEGRADED, now), cause=silent), ()
        case State.DEGRADED if worker:
            return ending.end(server, worker, "stalled", now)
        case State.DRAINING if worker:
            return ending.stop_now(server, worker, now)
        case State.STOPPING if worker:
            server = moves.with_worker(server, replace(worker, deadline=None, killed=True))
            return server, (SendSignal(server.name, worker.launch, "KILL"),)
        case State.BACKOFF:
            return moves.queue(server, now)
        case State.BLOCKED:
            later = now + moves.recheck_s(server.cause)
            return replace(server, attempt_at=later), (Recheck(server.name),)
        case _:
            return server, ()


def slept(server: Server, gap_s: float) -> Server:
    """Return *server* after the machine slept for *gap_s*: no timer ran on meanwhile."""
    worker = server.worker
    if worker is None:
        return server
    later = None if worker.deadline is None else worker.deadline + gap_s
    return moves.with_worker(
        server, replace(worker, moved_at=worker.moved_at + gap_s, deadline=later)
    )


def _stable_at(server: Server) -> float:
    return server.since + server.spec.restart.stable_after


def _replace_stalled_at(server: Server, worker: Worker) -> float:
    probe = server.spec.probe
    return worker.moved_at + probe.stall + STALLED_JUDGEMENTS * probe.interval
