"""Decide what one server does next: a pure step function over frozen state.

*step* takes a server, an event and the time, and returns the server as it is then together with the
effects that the world must carry out. Clocks, processes, sockets and files are somebody else's;
`daemon.supervisor.deadlines.wake_at` says when a `Tick` is due, so there are no timers to cancel either.

    stopped ─ blocked ─ failed          no process, nothing listens
    starting                            queued, then a process that has not said hello
    loading ─ ready ─ degraded          a process
    draining → stopping                 a process on its way out: drain, SIGTERM, grace, SIGKILL
    backoff                             no process; the supervisor answers 503 until the next attempt
"""

from __future__ import annotations

from dataclasses import replace

from daemon.supervisor import deadlines, ending, moves, news, rollback
from daemon.supervisor.events import (
    Block,
    Event,
    Grant,
    Hurry,
    Replace,
    Restart,
    SendLive,
    Share,
    Slept,
    Spawn,
    Start,
    Stop,
    Tick,
    Unblock,
    Update,
)
from daemon.supervisor.moves import Result
from daemon.supervisor.server import Cause, Desired, Section, Server, State, Worker


def step(server: Server, event: Event, now: float) -> Result:
    """Return *server* after *event*, and what the world must do about it."""
    match event:
        case Start():
            return _start(server, now)
        case Stop():
            return _stop(replace(server, desired=Desired.STOPPED), now)
        case Restart():
            return _restart(server, now)
        case Hurry():
            if server.worker is None or server.state is not State.DRAINING:
                return server, ()
            return ending.stop_now(server, server.worker, now)
        case Replace(spec, spec_hash, claim):
            return _replace(server, Section(spec, spec_hash, claim), now)
        case Update(spec, claim):
            return _update(replace(server, spec=spec, claim=claim))
        case Share(share):
            return _share(server, share)
        case Block(cause):
            return _block(server, cause, now)
        case Unblock():
            return moves.queue(server, now) if server.state is State.BLOCKED else (server, ())
        case Grant(nonce, share):
            return _grant(server, nonce, share, now)
        case Tick():
            return deadlines.tick(server, now)
        case Slept(gap_s):
            return deadlines.slept(server, gap_s), ()
        case _:
            worker = server.worker
            if worker is None or worker.launch != event.launch:
                return server, ()  # news of a worker that has been reaped
            return news.heard(server, worker, event, now)


def _start(server: Server, now: float) -> Result:
    server = moves.forgive(replace(server, desired=Desired.RUNNING))
    if server.worker is not None or server.queued:
        return server, ()  # one that is on its way out is followed by another
    return moves.queue(rollback.retried(server), now)


def _stop(server: Server, now: float) -> Result:
    if server.worker is not None:
        return ending.end(server, server.worker, "stop", now)
    if server.state is State.STOPPED:
        return replace(server, cause=None), ()
    return moves.enter(moves.forgive(server), State.STOPPED, now), ()


def _restart(server: Server, now: float) -> Result:
    server = moves.forgive(replace(rollback.retried(server), desired=Desired.RUNNING))
    if server.worker is not None:
        return ending.end(server, server.worker, "restart", now)
    return (server, ()) if server.queued else moves.queue(server, now)


def _replace(server: Server, section: Section, now: float) -> Result:
    in_force = server.section
    server = moves.forgive(rollback.replaced(server, section))
    worker = server.worker
    if worker is not None and worker.spec_hash == section.spec_hash and worker.ending is None:
        return _update(server) if section != in_force else (server, ())
    if worker is not None:
        return ending.end(server, worker, "replace", now)
    if server.desired is Desired.STOPPED or server.queued:
        return server, ()
    return moves.queue(server, now)


def _update(server: Server) -> Result:
    worker = server.worker
    if worker is None or worker.ending is not None:
        return server, ()
    server = moves.with_worker(server, replace(worker, claim=server.claim))
    return server, (_live(server.name, worker),)


def _share(server: Server, share: int) -> Result:
    worker = server.worker
    if worker is None or worker.ending is not None:
        return server, ()
    worker = replace(worker, share=share)
    return moves.with_worker(server, worker), (_live(server.name, worker),)


def _live(name: str, worker: Worker) -> SendLive:
    return SendLive(name, worker.launch, worker.share)


def _block(server: Server, cause: Cause, now: float) -> Result:
    startable = server.queued or server.state in (State.BLOCKED, State.BACKOFF)
    if not startable or server.desired is Desired.STOPPED:
        return server, ()
    return moves.block(server, cause, now), ()


def _grant(server: Server, nonce: str, share: int, now: float) -> Result:
    if not server.queued:
        return server, ()
    launch = server.launches + 1
    worker = Worker(
        launch,
        nonce,
        server.spec_hash,
        server.address,
        started_at=now,
        moved_at=now,
        claim=server.claim,
        share=share,
    )
    server = replace(server, launches=launch, worker=worker, cause=None)
    return server, (Spawn(server.name, launch, nonce, share),)
