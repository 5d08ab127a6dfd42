"""Turn what is in servers.yaml into what is wanted, again and again, without losing what runs.

One pass reads the files once, compares, makes sure that new addresses can be had, and hands the edit to
the reconciler whole. Whatever is wrong refuses the whole edit and disturbs nothing. Passes follow one
another; while one runs, any number of requests wait for the next one together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from daemon.config import diff as differ
from daemon.config.load import Loaded, RejectedError, load
from daemon.config.machine import machine
from daemon.config.prepare import Prepared, PreparedServer, prepare
from daemon.config.spec import DaemonSpec
from daemon.errors import ConfigError, Problem, TqdError
from daemon.log import get_logger
from daemon.paths import StateDir
from daemon.policy.store import load_allowlist
from daemon.supervisor import device, edits, events, memory, plan
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.last_good import LastGood
from daemon.supervisor.lifecycle import NO_MEMORY
from daemon.supervisor.reconcile import Reconciler, Wanted
from daemon.supervisor.server import Cause, Desired, State
from daemon.supervisor.sockets import AddressTakenError, Sockets
from daemon.supervisor.watch import Look, Watch, look

REMOVAL_CONFIRM_S = 5.0  # an edit that takes this much away may be half of a file being written

Outcome = TypeVar("Outcome")

ConfigState = Literal["applied", "rejected", "stale", "pending"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one reading of the configuration that was not refused."""

    result: Literal["applied", "unchanged"]
    steps: tuple[differ.Step, ...] = ()
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What became of one reading of the configuration, refusals included."""

    result: Literal["applied", "noop", "rejected"]
    generation: int
    steps: tuple[differ.Step, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Reloads:
    """What became of the passes since the start; *succeeded_at* is in seconds since the epoch."""

    applied: int = 0
    rejected: int = 0
    noop: int = 0
    succeeded_at: float | None = None

    def counted(self, outcome: Verdict | ConfigError, now: float) -> Reloads:
        """Return the counts after one more pass."""
        if isinstance(outcome, ConfigError):
            return replace(self, rejected=self.rejected + 1)
        if outcome.result == "unchanged":
            return replace(self, noop=self.noop + 1, succeeded_at=now)
        return replace(self, applied=self.applied + 1, succeeded_at=now)


@dataclass(frozen=True, slots=True)
class ConfigStatus:
    """What is on disk against what is in force; times are seconds since the epoch."""

    path: Path
    state: ConfigState = "applied"
    hash_on_disk: str | None = None
    hash_applied: str | None = None
    applied_at: float | None = None
    last_attempt_at: float | None = None
    generation: int = 0
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    reloads: Reloads = Reloads()


class Configuration:
    """Reads *path* and keeps what the reconciler wants equal to it.

    *busy* is told when a pass begins and ends, *adopted* which daemon block is in force, *concluded* what
    became of each reading, *waiting* which steps a file in manual mode waits for.
    """

    def __init__(
        self,
        path: Path,
        *,
        state: StateDir,
        environ: Mapping[str, str],
        reconciler: Reconciler,
        sockets: Sockets,
        desired: DesiredState,
        busy: Callable[[bool], None],
        adopted: Callable[[DaemonSpec], None],
        concluded: Callable[[Conclusion], None],
        waiting: Callable[[Sequence[str]], None],
    ) -> None:
        self.status = ConfigStatus(path)
        self.watch = Watch(self._changed)
        self._path = path
        self._state = state
        self._environ = environ
        self._reconciler = reconciler
        self._sockets = sockets
        self._desired = desired
        self._busy = busy
        self._adopted = adopted
        self._concluded = concluded
        self._waiting = waiting
        self._last_good = LastGood(state.last_good, environ)
        self._loaded: Loaded
        self._applied: Prepared
        self._watched: tuple[Path, ...] = (path,)
        self._dirty = asyncio.Event()
        self._asked: list[asyncio.Future[Verdict]] = []
        self._looking: list[asyncio.Future[None]] = []
        self._log = get_logger()

    @property
    def loaded(self) -> Loaded:
        """The configuration in force as its files say it."""
        return self._loaded

    async def read_first(self) -> DaemonSpec:
        """Read what is on disk, or the last good configuration when that is broken; start nothing yet.

        Raises:
            ConfigError: it is broken, and there is no last good one.
        """
        self.status = replace(self.status, last_attempt_at=time.time())
        try:
            self._loaded = await self._read()
            self._applied = await self._prepare(self._loaded)
        except ConfigError as error:
            loaded = await asyncio.to_thread(self._last_good.load, self._path)
            if loaded is None:
                raise
            self._loaded = loaded
            self._applied = await self._prepare(loaded)
            self.status = replace(self.status, state="stale", problems=error.problems)
        return self._applied.daemon

    async def start_first(self) -> None:
        """Start what `read_first` has found."""
        faults = self.status.problems
        await self._apply(self._applied, {})
        if faults:
            self.status = replace(self.status, state="stale", hash_on_disk=None, problems=faults)
            self._log.error("config.stale", problems=[str(it) for it in faults])
            self._conclude("rejected", problems=faults)

    async def run(self) -> None:
        """Read again whenever that is asked for, until cancelled."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            looking, self._looking = self._looking, []
            asked, self._asked = self._asked, []
            if looking:
                await self._guarded(self._look_for_files())
                for look_waiter in looking:
                    _settle(look_waiter, None)
            if asked:
                self._busy(True)
                verdict = await self._guarded(self._pass())
                reloads = self.status.reloads.counted(verdict, time.time())
                self.status = replace(self.status, reloads=reloads)
                for waiter in asked:
                    _settle(waiter, verdict)
                self._busy(False)

    async def reload(self) -> Verdict:
        """Read again and apply, whatever the file's dates say.

        Raises:
            ConfigError: it was refused; what runs goes on.
            TqdError: `daemon.reload` is off.
        """
        if self._reconciler.wanted.daemon.reload == "off":
            raise TqdError(
                "daemon.reload is off: the configuration is read only when the daemon starts",
                hint="`tqd shutdown`, then `tqd start`",
            )
        waiter: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._asked.append(waiter)
        self._dirty.set()
        return await waiter

    def ask(self) -> None:
        """Begin a reload that nobody waits for."""
        if self._reconciler.wanted.daemon.reload != "off":
            self._asked.append(asyncio.get_running_loop().create_future())
            self._dirty.set()

    def recheck(self) -> None:
        """Begin to look whether what blocks servers, such as a missing model, is still so."""
        self._looking.append(asyncio.get_running_loop().create_future())
        self._dirty.set()

    async def look_for_files(self) -> None:
        """Look whether what blocks servers, such as a missing model, is still so."""
        self.recheck()
        await self._looking[-1]

    async def diff(self) -> tuple[differ.Step, ...]:
        """Return what `reload` would do; raises as `reload` does."""
        prepared = await self._prepare(await self._read(follow=False))
        differ.refuse_daemon_changes(self._applied, prepared)
        return differ.diff(self._applied.servers, prepared.servers)

    async def _changed(self) -> None:
        """The files have changed and come to rest."""
        mode = self._reconciler.wanted.daemon.reload
        if mode == "auto":
            self.ask()
        elif mode == "manual":
            steps = await self._guarded(self.diff())
            if isinstance(steps, ConfigError):
                return
            state: ConfigState = "pending" if steps else "applied"
            pending = tuple(map(str, steps))
            self.status = replace(self.status, state=state, problems=(), pending=pending)
            self._log.info("config.pending", steps=pending)
            self._waiting(pending)

    async def _guarded(self, reading: Awaitable[Outcome]) -> Outcome | ConfigError:
        """Return the outcome of *reading*, or its refusal; whatever happens, what runs goes on."""
        try:
            return await reading
        except ConfigError as error:
            refusal = error
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end what runs
            self._log.exception("config.failed")
            said = f"tqd failed to read this: {error!r}"
            refusal = ConfigError([Problem(str(self._path), 0, 0, "", said)])
        self._refuse(refusal)
        return refusal

    async def _pass(self) -> Verdict:
        while True:
            self.status = replace(self.status, last_attempt_at=time.time())
            loaded = await self._read()
            if loaded.content_hash == self._applied.content_hash and not await self._new_evidence():
                return self._unchanged(loaded)
            prepared = await self._prepare(loaded)
            before = self._applied.servers
            differ.refuse_daemon_changes(self._applied, prepared)
            steps = differ.diff(before, prepared.servers)
            starting = edits.to_run(steps, self._desired_of)
            self._refuse_blocked(loaded, starting)
            self._refuse_unfit(loaded, prepared, steps, starting)
            if edits.removes_much(steps, self._running()) and not await self._stays_as_it_is():
                continue
            self._reserve_addresses(loaded, starting)
            self._loaded = loaded
            return Verdict("applied", await self._apply(prepared, before), loaded.warnings)

    async def _read(self, *, follow: bool = True) -> Loaded:
        """Return the configuration on disk; the watch then waits for something newer than that."""
        loaded, seen = await asyncio.to_thread(_read, self._path, self._environ, self._watched)
        if follow:
            self._watched = tuple(seen)
            self.watch.follow(seen)
        if isinstance(loaded, ConfigError):
            raise loaded
        return loaded

    async def _prepare(self, loaded: Loaded) -> Prepared:
        return await asyncio.to_thread(self._prepare_here, loaded)

    def _prepare_here(self, loaded: Loaded) -> Prepared:
        facts = device.facts(self._state, self._environ)
        return prepare(loaded, state=self._state, on=machine(facts))

    async def _new_evidence(self) -> bool:
        """Whether `tqd eval --record` has written to the allow-list since it was last read."""
        entries = await asyncio.to_thread(load_allowlist, self._state.allowlist)
        return entries != self._applied.allowlist

    def _unchanged(self, loaded: Loaded) -> Verdict:
        self.status = replace(
            self.status,
            state="applied",
            hash_on_disk=loaded.content_hash,
            problems=(),
            pending=(),
        )
        self._log.info("config.unchanged", content_hash=loaded.content_hash[:16])
        self._conclude("noop", warnings=loaded.warnings)
        return Verdict("unchanged", warnings=loaded.warnings)

    def _refuse(self, error: ConfigError) -> None:
        """Keep everything as it is, and say what is wrong, once."""
        news = self.status.state != "rejected" or self.status.problems != error.problems
        state: ConfigState = "stale" if self.status.state == "stale" else "rejected"
        self.status = replace(
            self.status, state=state, hash_on_disk=None, problems=error.problems, pending=()
        )
        if news:
            self._log.error("config.rejected", problems=[str(it) for it in error.problems])
        self._conclude("rejected", problems=error.problems)

    def _conclude(
        self,
        result: Literal["applied", "noop", "rejected"],
        *,
        steps: tuple[differ.Step, ...] = (),
        problems: tuple[Problem, ...] = (),
        warnings: tuple[Problem, ...] = (),
    ) -> None:
        generation = self.status.generation
        self._concluded(Conclusion(result, generation, steps, problems, warnings))

    def _refuse_blocked(self, loaded: Loaded, servers: Sequence[PreparedServer]) -> None:
        problems = [
            loaded.sources[server.name].problem(
                "model", server.blocked.message, server.blocked.hint
            )
            for server in edits.newly_blocked(servers, self._applied.servers)
            if server.blocked is not None
        ]
        if problems:
            raise ConfigError(problems)

    def _refuse_unfit(
        self,
        loaded: Loaded,
        prepared: Prepared,
        steps: Sequence[differ.Step],
        starting: Sequence[PreparedServer],
    ) -> None:
        """Refuse an edit whose servers cannot all have the memory they need, before anything is stopped for it."""
        unfit = edits.unfit(
            starting,
            steps,
            self._applied.servers,
            self._reconciler.fleet.servers,
            prepared.budget_bytes,
        )
        problems = [
            loaded.sources[name].problem("", f"it does not fit: {refusal}", memory.HINT)
            for name, refusal in unfit.items()
        ]
        if problems:
            raise ConfigError(problems)

    def _reserve_addresses(self, loaded: Loaded, servers: Sequence[PreparedServer]) -> None:
        """Hold every address that is new in this edit, before anything is stopped for it."""
        problems = []
        for server in edits.newly_addressed(servers, self._applied.servers):
            try:
                self._sockets.reserve(edits.address(server))
            except AddressTakenError as error:
                source = loaded.sources[server.name]
                problems.append(source.problem("port", error.message, error.hint))
        if problems:
            self._sockets.settle()
            raise ConfigError(problems)

    def _running(self) -> frozenset[str]:
        return frozenset(it.name for it in self._reconciler.fleet.servers.values() if it.worker)

    async def _stays_as_it_is(self) -> bool:
        """Give a newer file the time to appear."""
        self._log.warning("config.pending", reason="it removes much", confirm_s=REMOVAL_CONFIRM_S)
        seen = await asyncio.to_thread(look, self._watched)
        await asyncio.sleep(REMOVAL_CONFIRM_S)
        return await asyncio.to_thread(look, self._watched) == seen

    async def _apply(self, prepared: Prepared, before: edits.Servers) -> tuple[differ.Step, ...]:
        """Put *prepared* in force in the place of *before*; return the steps."""
        steps = differ.diff(before, prepared.servers)
        changes = edits.changes(steps, before, prepared.servers, self._desired_of)
        await self._submit(prepared, changes)
        self._sockets.settle()
        self._desired.forget(before.keys() - prepared.servers.keys())
        saved = await asyncio.to_thread(
            self._last_good.save, self._path, prepared.files, prepared.content_hash
        )
        if not saved:
            self._log.warning("config.not_saved", path=str(self._state.last_good))
        self.status = replace(
            self.status,
            state="applied",
            hash_on_disk=prepared.content_hash,
            hash_applied=prepared.content_hash,
            applied_at=time.time(),
            generation=self.status.generation + 1,
            problems=(),
            warnings=tuple(map(str, prepared.warnings)),
            pending=(),
        )
        if prepared.warnings:
            self._log.warning("config.loaded", warnings=list(self.status.warnings))
        self._log.info("plan.applied", steps=[str(step) for step in steps])
        self._conclude("applied", steps=steps, warnings=prepared.warnings)
        return steps

    async def _submit(
        self, prepared: Prepared, changes: tuple[plan.Remove | plan.Put | plan.Adjust, ...]
    ) -> None:
        self._applied = prepared
        daemon = prepared.daemon
        event = plan.Apply(changes, daemon.max_parallel_loads, prepared.budget_bytes)
        await self._reconciler.submit(event, Wanted(prepared.servers, daemon, prepared.machine))
        self._adopted(daemon)

    def _desired_of(self, server: PreparedServer) -> Desired:
        return self._desired.of(server.name, server.spec)

    async def _look_for_files(self) -> None:
        """Let servers start whose model, or other file, has appeared since."""
        if not self._blocked():
            return
        try:
            found = await self._prepare(self._loaded)
        except ConfigError as error:
            for name in self._blocked():
                cause = Cause("model_fault", str(error))
                self._reconciler.post(name, events.Block(cause))
            return
        free = {name: it for name in self._blocked() if not (it := found.servers[name]).blocked}
        if free:
            servers = {**self._applied.servers, **free}
            await self._submit(
                replace(self._applied, servers=servers),
                tuple(edits.put(it, Desired.RUNNING) for it in free.values()),
            )

    def _blocked(self) -> list[str]:
        servers = self._reconciler.fleet.servers.values()
        names = [
            it.name
            for it in servers
            if it.state is State.BLOCKED and it.cause and it.cause.code != NO_MEMORY
        ]
        return [name for name in names if name in self._applied.servers]


def _settle(waiter: asyncio.Future[Outcome], outcome: Outcome | ConfigError) -> None:
    if waiter.done():
        return  # whoever asked has gone
    if isinstance(outcome, ConfigError):
        waiter.set_exception(outcome)
        waiter.exception()  # asked by nobody in particular: no complaint that it was never looked at
    else:
        waiter.set_result(outcome)


def _read(
    path: Path, environ: Mapping[str, str], files: Sequence[Path]
) -> tuple[Loaded | RejectedError, Look]:
    """Return the configuration, or why there is none, and a look at its files from before they were read."""
    while True:
        seen = look(files)
        result: Loaded | RejectedError
        try:
            result = load(path, environ=environ)
        except RejectedError as error:
            result = error
        if seen.keys() >= set(result.watched):
            return result, {file: seen[file] for file in result.watched}
        files = result.watched
