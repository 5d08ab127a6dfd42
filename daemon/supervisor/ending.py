"""End a worker, and decide what becomes of its server: it stays down, is started again, or goes back."""

from __future__ import annotations

from dataclasses import replace

from daemon.errors import WorkerExit
from daemon.supervisor import exits, moves, rollback
from daemon.supervisor.events import Exited, Recheck, SendDrain, SendSignal, SpawnFailed
from daemon.supervisor.moves import Result
from daemon.supervisor.server import Cause, Desired, Ending, LastExit, Server, State, Worker

JITTER = 0.2  # share of a delay that varies: servers that died together do not return together

# What is not the server's fault is waited for and does not count as a failure.
BLOCKING = frozenset({"port_in_use", "model_missing", "file_missing", "model_fault"})


def end(
    server: Server, worker: Worker, why: Ending, now: float, message: str | None = None
) -> Result:
    """Begin to end *worker*; one that is already ending goes on, for the newest reason."""
    marked = replace(worker, ending=why, ending_message=message)
    if worker.ending is not None:
        return moves.with_worker(server, marked), ()
    server = moves.with_worker(server, marked)
    serving = server.state in (State.READY, State.DEGRADED)
    if serving and why in ("stop", "restart", "replace"):
        timeout_s = server.spec.drain_timeout
        server = moves.with_worker(server, replace(marked, deadline=now + timeout_s))
        return moves.enter(server, State.DRAINING, now), (
            SendDrain(server.name, worker.launch, timeout_s),
        )
    return stop_now(server, marked, now)


def stop_now(server: Server, worker: Worker, now: float) -> Result:
    """Ask *worker* to end at once, without waiting for its running requests."""
    server = moves.enter(server, State.STOPPING, now)
    if worker.pid is None:
        return server, ()  # the signal follows when the process exists
    return signal_term(server, worker, now)


def signal_term(server: Server, worker: Worker, now: float) -> Result:
    """Send SIGTERM to *worker*; SIGKILL follows after its grace."""
    server = moves.with_worker(server, replace(worker, deadline=now + server.spec.stop_grace))
    return server, (SendSignal(server.name, worker.launch, "TERM"),)


def exited(server: Server, worker: Worker, event: Exited, now: float) -> Result:
    """Decide what becomes of *server* now that the process of *worker* is gone."""
    last = LastExit(worker.launch, event.code, now, exits.classify(worker, event.code), event.tail)
    gone = replace(server, worker=None, last_exit=last)
    if server.desired is Desired.STOPPED:
        return moves.enter(gone, State.STOPPED, now), ()
    if worker.ending in ("stop", "restart", "replace"):
        return moves.queue(gone, now)
    failed = _failed(gone, worker, event, now)
    return failed if worker.ready_at is not None else _roll_back(gone, failed, now)


def spawn_failed(server: Server, worker: Worker, event: SpawnFailed, now: float) -> Result:
    """Decide what becomes of *server*, whose process could not be started."""
    gone = replace(server, worker=None)
    if server.desired is Desired.STOPPED:
        return moves.enter(gone, State.STOPPED, now), ()
    if worker.ending is not None:
        return moves.queue(gone, now)
    if event.cause.code in BLOCKING:
        # files that it lacked when they were last looked for may be there by now
        look = () if event.cause.code == "port_in_use" else (Recheck(server.name),)
        return moves.block(gone, event.cause, now), look
    return _roll_back(gone, _back_off(gone, event.cause, event.jitter, now), now)


def _roll_back(gone: Server, failed: Result, now: float) -> Result:
    """Return what becomes of a server whose new section was not ready when its worker ended."""
    cause = failed[0].cause
    back = None if cause is None else rollback.rolled_back(gone, cause, now)
    if back is None:
        return failed
    back = replace(moves.forgive(back), restarts_total=back.restarts_total + 1)
    return moves.queue(back, now)


def _failed(server: Server, worker: Worker, event: Exited, now: float) -> Result:
    """Return what becomes of a server whose worker is gone although it was to run."""
    cause = exits.cause(worker, event, now)
    if worker.ending == "protocol":
        return _fail(server, cause, now)
    if worker.ending is not None:
        return _back_off(server, cause, event.jitter, now)
    match event.code:
        case WorkerExit.BAD_CONFIG:
            return _fail(server, cause, now)
        case WorkerExit.MODEL_MISSING | WorkerExit.PORT_TAKEN:
            return moves.block(server, cause, now), ()
        case WorkerExit.OK if server.spec.restart.policy != "always":
            return replace(moves.enter(server, State.STOPPED, now), cause=cause), ()
        case _:
            return _back_off(server, cause, event.jitter, now)


def _back_off(server: Server, cause: Cause, jitter: float, now: float) -> Result:
    """Try again later, or give up: `restart.max` restarts are allowed within `restart.window`."""
    rules = server.spec.restart
    if rules.policy == "never":
        return _fail(server, cause, now)
    recent = tuple(at for at in server.restarts if now - at < rules.window)
    if len(recent) >= rules.max:
        often = f"failed {len(recent) + 1} times within {rules.window:.0f} s; the last time: "
        message = often + cause.message if recent else cause.message
        return _fail(server, replace(cause, message=message), now)
    first, longest = rules.backoff
    delay = min(first * 2.0 ** min(server.failures, 32), longest) * (1 + JITTER * jitter)
    server = moves.enter(server, State.BACKOFF, now)
    return replace(
        server,
        cause=cause,
        attempt_at=now + delay,
        failures=server.failures + 1,
        restarts=(*recent, now),
        restarts_total=server.restarts_total + 1,
    ), ()


def _fail(server: Server, cause: Cause, now: float) -> Result:
    return replace(moves.enter(server, State.FAILED, now), cause=cause), ()
