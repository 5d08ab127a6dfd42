"""Decide what one server does next: a pure step function over frozen state.

*step* takes a server, an event and the time, and returns the server as it is then together with the
effects that the world must carry out. Clocks, processes, sockets and files are somebody else's;
`wake_at` says when a `Tick` is due, so there are no timers to cancel either.

    stopped ─ blocked ─ failed          no process, nothing listens
    starting                            queued, then a process that has not said hello
    loading ─ ready ─ degraded          a process
    draining → stopping                 a process on its way out: drain, SIGTERM, grace, SIGKILL
    backoff                             no process; the supervisor answers 503 until the next attempt
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from daemon.config.wire import PROTOCOL
from daemon.errors import WorkerExit
from daemon.supervisor import exits, rollback
from daemon.supervisor.events import (
    Beat,
    Block,
    Effect,
    Event,
    Exited,
    Garbled,
    Grant,
    Hello,
    Hurry,
    Measured,
    Progress,
    Ready,
    Recheck,
    Replace,
    Restart,
    SendDrain,
    SendLive,
    SendSignal,
    Share,
    Slept,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    Stop,
    Tick,
    Unblock,
    Update,
)
from daemon.supervisor.server import (
    Cause,
    Desired,
    Ending,
    LastExit,
    Section,
    Server,
    State,
    Worker,
)

RECHECK_S = 5.0  # how often a port that blocks a server is tried again
RECHECK_FILES_S = 30.0  # how often missing files are looked for; that reads every model's headers
JITTER = 0.2  # share of a delay that varies: servers that died together do not return together
STALLED_JUDGEMENTS = 3  # a degraded worker gets this many probe intervals to move again
TAIL_LINES = 20
NO_MEMORY = "insufficient_memory"  # such a block is lifted by whoever divides the memory

# What is not the server's fault is waited for and does not count as a failure.
BLOCKING = frozenset({"port_in_use", "model_missing", "file_missing", "model_fault"})

Result = tuple[Server, tuple[Effect, ...]]


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
            return _stop_now(server, server.worker, now)
        case Replace(spec, spec_hash, claim):
            return _replace(server, Section(spec, spec_hash, claim), now)
        case Update(spec, claim):
            return _update(replace(server, spec=spec, claim=claim))
        case Share(share):
            return _share(server, share)
        case Block(cause):
            return _block(server, cause, now)
        case Unblock():
            return _queue(server, now) if server.state is State.BLOCKED else (server, ())
        case Grant(nonce, share):
            return _grant(server, nonce, share, now)
        case Tick():
            return _tick(server, now)
        case Slept(gap_s):
            return _slept(server, gap_s), ()
        case _:
            worker = server.worker
            if worker is None or worker.launch != event.launch:
                return server, ()  # news of a worker that has been reaped
            return _heard(server, worker, event, now)


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


def _start(server: Server, now: float) -> Result:
    server = _forgiven(replace(server, desired=Desired.RUNNING))
    if server.worker is not None or server.queued:
        return server, ()  # one that is on its way out is followed by another
    return _queue(rollback.retried(server), now)


def _stop(server: Server, now: float) -> Result:
    if server.worker is not None:
        return _end(server, server.worker, "stop", now)
    if server.state is State.STOPPED:
        return replace(server, cause=None), ()
    return _enter(_forgiven(server), State.STOPPED, now), ()


def _restart(server: Server, now: float) -> Result:
    server = _forgiven(replace(rollback.retried(server), desired=Desired.RUNNING))
    if server.worker is not None:
        return _end(server, server.worker, "restart", now)
    return (server, ()) if server.queued else _queue(server, now)


def _replace(server: Server, section: Section, now: float) -> Result:
    in_force = server.section
    server = _forgiven(rollback.replaced(server, section))
    worker = server.worker
    if worker is not None and worker.spec_hash == section.spec_hash and worker.ending is None:
        return _update(server) if section != in_force else (server, ())
    if worker is not None:
        return _end(server, worker, "replace", now)
    if server.desired is Desired.STOPPED or server.queued:
        return server, ()
    return _queue(server, now)


def _update(server: Server) -> Result:
    worker = server.worker
    if worker is None or worker.ending is not None:
        return server, ()
    server = _with(server, replace(worker, claim=server.claim))
    return server, (_live(server.name, worker),)


def _share(server: Server, share: int) -> Result:
    worker = server.worker
    if worker is None or worker.ending is not None:
        return server, ()
    worker = replace(worker, share=share)
    return _with(server, worker), (_live(server.name, worker),)


def _live(name: str, worker: Worker) -> SendLive:
    return SendLive(name, worker.launch, worker.share)


def _block(server: Server, cause: Cause, now: float) -> Result:
    startable = server.queued or server.state in (State.BLOCKED, State.BACKOFF)
    if not startable or server.desired is Desired.STOPPED:
        return server, ()
    return _blocked(server, cause, now), ()


def _blocked(server: Server, cause: Cause, now: float) -> Server:
    if server.state is not State.BLOCKED:
        server = _enter(server, State.BLOCKED, now)
    later = None if cause.code == NO_MEMORY else now + _recheck_s(cause)
    return replace(server, cause=cause, attempt_at=later)


def _recheck_s(cause: Cause | None) -> float:
    return RECHECK_S if cause is not None and cause.code == "port_in_use" else RECHECK_FILES_S


def _forgiven(server: Server) -> Server:
    return replace(server, failures=0, restarts=())


def _queue(server: Server, now: float) -> Result:
    return _enter(server, State.STARTING, now), ()


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


def _spawn_failed(server: Server, worker: Worker, event: SpawnFailed, now: float) -> Result:
    gone = replace(server, worker=None)
    if server.desired is Desired.STOPPED:
        return _enter(gone, State.STOPPED, now), ()
    if worker.ending is not None:
        return _queue(gone, now)
    if event.cause.code in BLOCKING:
        return _blocked(gone, event.cause, now), ()
    return _roll_back(gone, _back_off(gone, event.cause, event.jitter, now), now)


Heard = Spawned | SpawnFailed | Hello | Progress | Ready | Beat | Measured | Garbled | Exited


def _heard(server: Server, worker: Worker, event: Heard, now: float) -> Result:
    match event:
        case Spawned(_, pid):
            worker = replace(worker, pid=pid, moved_at=now)
            server = _with(server, worker)
            return _signal_term(server, worker, now) if worker.ending else (server, ())
        case SpawnFailed():
            return _spawn_failed(server, worker, event, now)
        case Hello():
            return _hello(server, worker, event, now)
        case Progress(_, stage, fraction):
            if server.state is not State.LOADING or (stage, fraction) == (
                worker.stage,
                worker.fraction,
            ):
                return server, ()
            return _with(server, replace(worker, stage=stage, fraction=fraction, moved_at=now)), ()
        case Ready():
            return _ready(server, worker, event, now)
        case Beat():
            return _beat(server, worker, event, now)
        case Measured(_, used):
            return _with(server, replace(worker, used=used)), ()
        case Garbled(_, message):
            return _protocol(server, worker, message, now)
        case Exited():
            return _exited(server, worker, event, now)
        case _:
            assert_never(event)


def _hello(server: Server, worker: Worker, event: Hello, now: float) -> Result:
    if event.nonce != worker.nonce:
        return _protocol(server, worker, "its hello is not for this launch", now)
    if event.protocol != PROTOCOL:
        speaks = f"it speaks protocol {event.protocol}, this daemon {PROTOCOL}"
        return _protocol(server, worker, speaks, now)
    server = _with(server, replace(worker, moved_at=now))
    return (_enter(server, State.LOADING, now) if server.state is State.STARTING else server), ()


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
    return _enter(rollback.proven(_with(server, ready)), State.READY, now), ()


def _beat(server: Server, worker: Worker, event: Beat, now: float) -> Result:
    if event.generation <= worker.generation or worker.ready_at is None:
        return _with(server, replace(worker, promised=event.promised)), ()
    moved = replace(worker, promised=event.promised, generation=event.generation, moved_at=now)
    server = _with(server, moved)
    return (_enter(server, State.READY, now) if server.state is State.DEGRADED else server), ()


def _protocol(server: Server, worker: Worker, message: str, now: float) -> Result:
    if worker.ending is not None:
        return server, ()
    return _end(server, worker, "protocol", now, message)


def _end(
    server: Server, worker: Worker, why: Ending, now: float, message: str | None = None
) -> Result:
    """Begin to end *worker*; one that is already ending goes on, for the newest reason."""
    marked = replace(worker, ending=why, ending_message=message)
    if worker.ending is not None:
        return _with(server, marked), ()
    server = _with(server, marked)
    serving = server.state in (State.READY, State.DEGRADED)
    if serving and why in ("stop", "restart", "replace"):
        timeout_s = server.spec.drain_timeout
        server = _with(server, replace(marked, deadline=now + timeout_s))
        return _enter(server, State.DRAINING, now), (
            SendDrain(server.name, worker.launch, timeout_s),
        )
    return _stop_now(server, marked, now)


def _stop_now(server: Server, worker: Worker, now: float) -> Result:
    server = _enter(server, State.STOPPING, now)
    if worker.pid is None:
        return server, ()  # the signal follows when the process exists
    return _signal_term(server, worker, now)


def _signal_term(server: Server, worker: Worker, now: float) -> Result:
    server = _with(server, replace(worker, deadline=now + server.spec.stop_grace))
    return server, (SendSignal(server.name, worker.launch, "TERM"),)


def _exited(server: Server, worker: Worker, event: Exited, now: float) -> Result:
    last = LastExit(worker.launch, event.code, now, exits.classify(worker, event.code), event.tail)
    gone = replace(server, worker=None, last_exit=last)
    if server.desired is Desired.STOPPED:
        return _enter(gone, State.STOPPED, now), ()
    if worker.ending in ("stop", "restart", "replace"):
        return _queue(gone, now)
    failed = _failed(gone, worker, event, now)
    return failed if worker.ready_at is not None else _roll_back(gone, failed, now)


def _roll_back(gone: Server, failed: Result, now: float) -> Result:
    """Return what becomes of a server whose new section was not ready when its worker ended."""
    cause = failed[0].cause
    back = None if cause is None else rollback.rolled_back(gone, cause, now)
    if back is None:
        return failed
    back = replace(_forgiven(back), restarts_total=back.restarts_total + 1)
    return _queue(back, now)


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
            return _blocked(server, cause, now), ()
        case WorkerExit.OK if server.spec.restart.policy != "always":
            return replace(_enter(server, State.STOPPED, now), cause=cause), ()
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
    server = _enter(server, State.BACKOFF, now)
    return replace(
        server,
        cause=cause,
        attempt_at=now + delay,
        failures=server.failures + 1,
        restarts=(*recent, now),
        restarts_total=server.restarts_total + 1,
    ), ()


def _fail(server: Server, cause: Cause, now: float) -> Result:
    return replace(_enter(server, State.FAILED, now), cause=cause), ()


def _tick(server: Server, now: float) -> Result:
    if server.state is State.READY and server.restarts and now >= _stable_at(server):
        server = _forgiven(server)
    due = wake_at(server)
    if due is None or now < due:
        return server, ()
    worker = server.worker
    match server.state:
        case State.STARTING if worker:
            return _end(server, worker, "spawn_timeout", now)
        case State.LOADING if worker:
            return _end(server, worker, "load_stalled", now)
        case State.READY:
            silent = Cause("stalled", "the engine's loop has not moved")
            return replace(_enter(server, State.DEGRADED, now), cause=silent), ()
        case State.DEGRADED if worker:
            return _end(server, worker, "stalled", now)
        case State.DRAINING if worker:
            return _stop_now(server, worker, now)
        case State.STOPPING if worker:
            server = _with(server, replace(worker, deadline=None, killed=True))
            return server, (SendSignal(server.name, worker.launch, "KILL"),)
        case State.BACKOFF:
            return _queue(server, now)
        case State.BLOCKED:
            later = now + _recheck_s(server.cause)
            return replace(server, attempt_at=later), (Recheck(server.name),)
        case _:
            return server, ()


def _slept(server: Server, gap_s: float) -> Server:
    worker = server.worker
    if worker is None:
        return server
    later = None if worker.deadline is None else worker.deadline + gap_s
    return _with(server, replace(worker, moved_at=worker.moved_at + gap_s, deadline=later))


def _stable_at(server: Server) -> float:
    return server.since + server.spec.restart.stable_after


def _replace_stalled_at(server: Server, worker: Worker) -> float:
    probe = server.spec.probe
    return worker.moved_at + probe.stall + STALLED_JUDGEMENTS * probe.interval


def _with(server: Server, worker: Worker) -> Server:
    return replace(server, worker=worker)


def _enter(server: Server, state: State, now: float) -> Server:
    return replace(server, state=state, since=now, cause=None, attempt_at=None)
