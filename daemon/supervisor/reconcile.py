"""Keep reality equal to what is wanted: the one writer of the daemon's state.

Everything that happens comes in through one queue and is put to the pure core (daemon.supervisor.plan)
one after another; this module carries out what the core answers and logs what changed. It decides
nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from structlog.typing import FilteringBoundLogger

from daemon.config import wire
from daemon.config.handover import live_message, worker_spec
from daemon.config.machine import Machine
from daemon.config.prepare import PreparedServer
from daemon.config.spec import DaemonSpec
from daemon.log import get_logger
from daemon.supervisor import edits, events, plan, room
from daemon.supervisor.counts import Counts
from daemon.supervisor.events import Effect
from daemon.supervisor.listeners import listeners, same_listeners
from daemon.supervisor.plan import Fleet, Told
from daemon.supervisor.server import Address, Cause, Server, State
from daemon.supervisor.sockets import AddressTakenError, Sockets, try_out
from daemon.supervisor.workers import Workers

IDLE_S = 1.0  # the loop turns at least this often; its turning is what a watchdog watches
SLEPT_S = (
    5.0  # a turn that is late by this much means that the machine, workers included, stood still
)


@dataclass(frozen=True)
class Wanted:
    """What servers.yaml asks for, made ready to run."""

    servers: Mapping[str, PreparedServer] = field(default_factory=dict)
    daemon: DaemonSpec = field(default_factory=DaemonSpec)
    machine: Machine | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    event: plan.Event
    wanted: Wanted | None = None
    done: asyncio.Future[None] | None = None


class Reconciler:
    """Owns the fleet. Give it its workers, then await `run`.

    *profiles* is where workers keep calibration profiles. *changed* gets the fleet before and after each turn that changed it, *turned* is called after every
    turn of the loop, *recheck* when only reading the configuration again can tell whether a server is still blocked.
    """

    workers: Workers

    def __init__(
        self,
        *,
        sockets: Sockets,
        profiles: Path,
        log_path: Callable[[str, DaemonSpec], Path],
        clock: Callable[[], float],
        leftovers: Mapping[str, int],
        launched: Mapping[str, int],
        changed: Callable[[Fleet, Fleet], None],
        turned: Callable[[], None],
        recheck: Callable[[], None],
    ) -> None:
        self.fleet = Fleet(boot=secrets.token_hex(16), leftovers=leftovers, launched=launched)
        self.wanted = Wanted()
        self._wakes = plan.Wakes()
        self._sections: dict[tuple[str, str], PreparedServer] = {}
        self.counts = Counts()
        self._sockets = sockets
        self._profiles = profiles
        self._log_path = log_path
        self._clock = clock
        self._changed = changed
        self._turned = turned
        self._recheck = recheck
        self._over_budget = False
        self.exits = asyncio.Event()
        """Set whenever a worker has ended: what it used is free now."""
        self._refused: Mapping[Address, AddressTakenError] = {}
        self._jobs: deque[_Job] = deque()
        self._news = asyncio.Event()
        self._log = get_logger()

    def post(self, name: str, event: events.Event) -> None:
        """Put *event* about server *name* in the queue."""
        self.tell(Told(name, event))

    def tell(self, event: plan.Event) -> None:
        """Put *event* in the queue."""
        self._put(_Job(event))

    def in_force(self) -> Mapping[str, PreparedServer]:
        """Return every server as it runs, or would: that of a rolled back one is its previous section."""
        servers = self.fleet.servers.items()
        return {name: self._sections[name, server.spec_hash] for name, server in servers}

    async def submit(self, event: plan.Event, wanted: Wanted | None = None) -> None:
        """Put *event* in the queue and wait until it is dealt with; *wanted* is in force from then on."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Job(event, wanted, done))
        await done

    async def run(self) -> None:
        """Deal with events until the fleet is closed and its last process is gone."""
        turned_at = self._clock()
        while not (self.fleet.closing and plan.settled(self.fleet)):
            job = await self._next()
            gap_s = self._clock() - turned_at
            if gap_s > IDLE_S + SLEPT_S:
                await self._turn(_Job(plan.Woke(gap_s)))
            turned_at = self._clock()
            await self._turn(job)
            self._turned()
        await self._sockets.close()

    def _put(self, job: _Job) -> None:
        self._jobs.append(job)
        self._news.set()

    async def _next(self) -> _Job:
        if not self._jobs:
            self._news.clear()
            due = self._wakes.next()
            wait_s = IDLE_S if due is None else min(max(due - self._clock(), 0.0), IDLE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
        beats = tuple(self._beats())
        if beats:
            return _Job(plan.Beats(beats))
        return self._jobs.popleft() if self._jobs else _Job(plan.Passed())

    def _beats(self) -> Iterator[Told]:
        """Take the heartbeats that come before everything else in the queue."""
        while self._jobs:
            told = self._jobs[0].event
            if not (isinstance(told, Told) and isinstance(told.event, events.Beat)):
                return
            self._jobs.popleft()
            yield told

    async def _turn(self, job: _Job) -> None:
        before = self.fleet
        if job.wanted is not None:
            self.wanted = job.wanted
            self._sections |= {(it.name, it.spec_hash): it for it in job.wanted.servers.values()}
        self.fleet, effects = plan.step(before, job.event, self._clock())
        if job.wanted is not None:
            kept = plan.sections(self.fleet)
            self._sections = {key: it for key, it in self._sections.items() if key in kept}
        changed = plan.changed(before, self.fleet)
        self._wakes.follow(self.fleet, changed)
        self._note_changes(before, changed)
        self._changed(before, self.fleet)
        if isinstance(job.event, plan.Apply | plan.Measured):
            self._log_memory()
        if (
            self._refused
            or self._sockets.unsettled
            or not same_listeners(before, self.fleet, changed)
        ):
            await self._arrange_sockets()
        for effect in effects:
            self._carry_out(effect)
        if job.done is not None and not job.done.done():
            job.done.set_result(None)

    async def _arrange_sockets(self) -> None:
        self._refused = await self._sockets.arrange(listeners(self.fleet))
        for server in self.fleet.servers.values() if self._refused else ():
            error = self._refused.get(server.address)
            if error is not None and server.worker is None:
                self.post(server.name, events.Block(_port_in_use(error)))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case events.Spawn(name, launch, nonce, share):
                self._spawn(name, launch, nonce, share)
            case events.SendDrain(name, launch, timeout_s):
                self.workers.send(name, launch, wire.Drain(timeout_s=timeout_s))
            case events.SendLive(name, launch, share):
                if server := self.fleet.servers.get(name):
                    prepared = self._sections[name, server.spec_hash]
                    self.workers.send(name, launch, live_message(prepared, share or None))
            case events.SendSignal(name, launch, signal):
                self.workers.signal(name, launch, signal)
            case events.Recheck(name):
                self._look_again(self.fleet.servers[name])
            case _:
                assert_never(effect)

    def _spawn(self, name: str, launch: int, nonce: str, share: int) -> None:
        server, daemon = self.fleet.servers[name], self.wanted.daemon
        prepared = self._sections[name, server.spec_hash]
        if (cause := edits.cause(prepared)) is not None:
            self.workers.refuse(name, launch, cause)
            return
        address = server.address
        listener = self._sockets.get(address)
        if listener is None:
            self.workers.refuse(name, launch, _port_in_use(self._refused[address]))
            return
        spec = worker_spec(
            prepared,
            launch=launch,
            nonce=nonce,
            log_level=daemon.log.level,
            profiles=self._profiles,
            memory_limit_bytes=share or None,
        )
        self.workers.spawn(spec, listener, self._log_path(name, daemon))

    def _look_again(self, server: Server) -> None:
        if server.cause is None or server.cause.code != "port_in_use":
            self._recheck()
            return
        try:
            try_out(server.address)
        except AddressTakenError as error:
            self.post(server.name, events.Block(_port_in_use(error)))
        else:
            self.post(server.name, events.Unblock())

    def _log_memory(self) -> None:
        """Say once when the servers come to hold more memory than they may."""
        budget = self.fleet.budget
        held = sum(room.held(self.fleet.servers).values())
        over = budget is not None and held > budget
        if over and not self._over_budget:
            self._log.warning("memory.over_budget", held_bytes=held, budget_bytes=budget)
        self._over_budget = over

    def _note_changes(self, before: Fleet, changed: Sequence[str]) -> None:
        for name in changed:
            earlier, server = before.servers.get(name), self.fleet.servers[name]
            if earlier is None:
                continue
            if earlier.last_exit is not server.last_exit:
                self.exits.set()
            self.counts.changed(earlier, server)
            if not _looks_alike(earlier, server):
                _log_change(self._log.bind(server=name), earlier, server)


def _port_in_use(error: AddressTakenError) -> Cause:
    return Cause("port_in_use", error.message, error.hint)


def _looks_alike(before: Server, after: Server) -> bool:
    """Whether nothing has happened that a log tells: a heartbeat, progress, a live change."""
    return (
        after.state is before.state
        and after.last_exit is before.last_exit
        and after.divergence is before.divergence
    )


def _log_change(log: FilteringBoundLogger, before: Server, after: Server) -> None:
    """Log the change of one server, in one line per thing that happened."""
    exit_, cause, worker = after.last_exit, after.cause, after.worker
    why = {} if cause is None else {"code": cause.code, "reason": cause.message}
    if exit_ is not None and exit_ is not before.last_exit:
        log.info("worker.exited", exit_code=exit_.code, classified=exit_.classified)
    if before.state is State.DRAINING and after.state is State.STOPPING:
        log.warning("worker.drain_timed_out", drain_s=before.spec.drain_timeout)
    if after.divergence is not None and after.divergence is not before.divergence:
        failed = after.divergence.cause
        log.error("server.rolled_back", code=failed.code, reason=failed.message)
    if after.state is before.state:
        return
    match after.state:
        case State.LOADING:
            log.info("worker.loading")
        case State.READY if before.state is State.LOADING and worker and worker.ready_at:
            log.info("worker.ready", load_s=round(worker.ready_at - worker.started_at, 3))
        case State.READY:
            log.info("worker.ready", recovered=True)
        case State.DEGRADED:
            log.warning("worker.degraded", **why)
        case State.DRAINING:
            log.info("worker.draining", drain_s=after.spec.drain_timeout)
        case State.BACKOFF if after.attempt_at is not None:
            delay_s = round(after.attempt_at - after.since, 1)
            log.warning("worker.backed_off", delay_s=delay_s, restarts=len(after.restarts), **why)
        case State.FAILED:
            log.error("worker.failed", **why)
        case State.BLOCKED:
            log.warning("worker.blocked", **why)
        case State.STOPPED:
            log.info("worker.stopped", **why)
        case _:
            pass
