"""What a worker says of itself, and what is seen of it, does to its server."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from daemon.config.wire import PROTOCOL
from daemon.supervisor import ending, moves, rollback
from daemon.supervisor.events import (
    Beat,
    Exited,
    Garbled,
    Hello,
    Measured,
    Progress,
    Ready,
    Spawned,
    SpawnFailed,
)
from daemon.supervisor.moves import Result
from daemon.supervisor.server import Server, State, Worker

News = Spawned | SpawnFailed | Hello | Progress | Ready | Beat | Measured | Garbled | Exited


def heard(server: Server, worker: Worker, event: News, now: float) -> Result:
    """Decide what *event*, about *worker*, does to *server*."""
    match event:
        case Spawned(_, pid):
            worker = replace(worker, pid=pid, moved_at=now)
            server = moves.with_worker(server, worker)
            return ending.signal_term(server, worker, now) if worker.ending else (server, ())
        case SpawnFailed():
            return ending.spawn_failed(server, worker, event, now)
        case Hello():
            return _hello(server, worker, event, now)
        case Progress(_, stage, fraction):
            if server.state is not State.LOADING or (stage, fraction) == (
                worker.stage,
                worker.fraction,
            ):
                return server, ()
            return moves.with_worker(
                server, replace(worker, stage=stage, fraction=fraction, moved_at=now)
            ), ()
        case Ready():
            return _ready(server, worker, event, now)
        case Beat():
            return _beat(server, worker, event, now)
        case Measured(_, used):
            return moves.with_worker(server, replace(worker, used=used)), ()
        case Garbled(_, message):
            return _protocol(server, worker, message, now)
        case Exited():
            return ending.exited(server, worker, event, now)
        case _:
            assert_never(event)


def _hello(server: Server, worker: Worker, event: Hello, now: float) -> Result:
    if event.nonce != worker.nonce:
        return _protocol(server, worker, "its hello is not for this launch", now)
    if event.protocol != PROTOCOL:
        speaks = f"it speaks protocol {event.protocol}, this daemon {PROTOCOL}"
        return _protocol(server, worker, speaks, now)
    server = moves.with_worker(server, replace(worker, moved_at=now))
    return (
        moves.enter(server, State.LOADING, now) if server.state is State.STARTING else server
    ), ()


def _ready(server: Server, worker: Worker, event: Ready, now: float) -> Result:
    if worker.ending is not None:
        return server, ()
    if (event.nonce, event.spec_hash) != (worker.nonce, worker.spec_hash):
        return _protocol(server, worker, "it is ready for another launch or spec", now)
    if server.state is State.STARTING:
        return _protocol(server, worker, "it is ready before its hello", now)
    if server.state is not State.LOADING:
        return server, ()
    ready = replace(worker, fraction=1.0, ready_at=now, moved_at=now)
    return moves.enter(rollback.proven(moves.with_worker(server, ready)), State.READY, now), ()


def _beat(server: Server, worker: Worker, event: Beat, now: float) -> Result:
    if event.generation <= worker.generation or worker.ready_at is None:
        return moves.with_worker(server, replace(worker, promised=event.promised)), ()
    moved = replace(worker, promised=event.promised, generation=event.generation, moved_at=now)
    server = moves.with_worker(server, moved)
    return (moves.enter(server, State.READY, now) if server.state is State.DEGRADED else server), ()


def _protocol(server: Server, worker: Worker, message: str, now: float) -> Result:
    if worker.ending is not None:
        return server, ()
    return ending.end(server, worker, "protocol", now, message)
