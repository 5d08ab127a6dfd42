"""Turn what is in servers.yaml into what is wanted, again and again, without losing what runs.

daemon.supervisor.intake decides when to read and what becomes of a reading; this module looks at the
files, reads them, makes sure that new addresses can be had, and hands an edit to the reconciler whole.
Whatever is wrong refuses the whole edit and disturbs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, assert_never

from daemon.config import diff as differ
from daemon.config.load import Loaded, RejectedError, load
from daemon.config.machine import machine
from daemon.config.prepare import Prepared, PreparedServer, prepare
from daemon.config.spec import DaemonSpec
from daemon.errors import ConfigError, Problem, TqdError
from daemon.log import get_logger
from daemon.paths import StateDir
from daemon.policy.store import load_allowlist
from daemon.supervisor import device, edits, events, intake, plan
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.intake import Look
from daemon.supervisor.last_good import LastGood
from daemon.supervisor.lifecycle import NO_MEMORY
from daemon.supervisor.reconcile import Reconciler, Wanted
from daemon.supervisor.server import Address, Cause, Desired, State
from daemon.supervisor.sockets import AddressTakenError, Sockets
from daemon.supervisor.watch import FolderWatch, look

Result = Literal["applied", "noop", "rejected"]
ConfigState = Literal["applied", "rejected", "stale", "pending"]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What became of one reading of the configuration."""

    result: Result
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

    def counted(self, result: Result, now: float) -> Reloads:
        """Return the counts after one more pass."""
        match result:
            case "rejected":
                return replace(self, rejected=self.rejected + 1)
            case "noop":
                return replace(self, noop=self.noop + 1, succeeded_at=now)
            case "applied":
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
    pending: tuple[differ.Step, ...] = ()
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
        clock: Callable[[], float],
        busy: Callable[[bool], None],
        adopted: Callable[[DaemonSpec], None],
        concluded: Callable[[Conclusion], None],
        waiting: Callable[[Sequence[str]], None],
    ) -> None:
        self.status = ConfigStatus(path)
        self._path = path
        self._state = state
        self._environ = environ
        self._clock = clock
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
        self._intake = intake.Intake({path: None})
        self._woken = asyncio.Event()
        self._nudged = False
        self._passing = False
        self._asked: list[asyncio.Future[Conclusion]] = []
        self._answering: list[asyncio.Future[Conclusion]] = []
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
            found, seen = await self._read()
            self._intake = intake.Intake(seen)
            self._loaded = _right(found)
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
        steps = differ.diff({}, self._applied.servers)
        self._concluded(await self._apply(self._applied, {}, steps))
        if faults:
            self.status = replace(self.status, state="stale", hash_on_disk=None, problems=faults)
            self._log.error("config.stale", problems=[str(it) for it in faults])
            self._concluded(Conclusion("rejected", self.status.generation, problems=faults))

    async def run(self) -> None:
        """Watch the files, and read them whenever that is due or asked for, until cancelled."""
        folders = FolderWatch(asyncio.get_running_loop(), self._nudge)
        try:
            while True:
                watched = frozenset(path.parent for path in self._intake.seen)
                await asyncio.to_thread(folders.observe, watched)
                await self._wait()
                if self._looking:
                    await self._look()
                if self._asked:
                    await self._tell(intake.Asked())
                if self._nudged:
                    self._nudged = False
                    await self._tell(intake.Nudged())
                if self._clock() >= self._intake.look_at:
                    seen = await asyncio.to_thread(look, tuple(self._intake.seen))
                    await self._tell(intake.Looked(seen))
        finally:
            folders.stop()

    async def reload(self) -> Conclusion:
        """Read again and apply, whatever the file's dates say; return how that went well.

        Raises:
            ConfigError: it was refused; what runs goes on.
            TqdError: `daemon.reload` is off.
        """
        if self._reconciler.wanted.daemon.reload == "off":
            raise TqdError(
                "daemon.reload is off: the configuration is read only when the daemon starts",
                hint="`tqd shutdown`, then `tqd start`",
            )
        waiter: asyncio.Future[Conclusion] = asyncio.get_running_loop().create_future()
        self._asked.append(waiter)
        self._woken.set()
        return await waiter

    def ask(self) -> None:
        """Begin a reload that nobody waits for."""
        if self._reconciler.wanted.daemon.reload != "off":
            self._asked.append(asyncio.get_running_loop().create_future())
            self._woken.set()

    def recheck(self) -> None:
        """Begin to look whether what blocks servers, such as a missing model, is still so."""
        self._looking.append(asyncio.get_running_loop().create_future())
        self._woken.set()

    async def look_for_files(self) -> None:
        """Look whether what blocks servers, such as a missing model, is still so."""
        self.recheck()
        await self._looking[-1]

    async def lost(self) -> Mapping[str, Problem]:
        """Look for the files of what runs; return why servers could not start again, by name."""
        try:
            found = await self._prepare_again(self._loaded)
        except ConfigError:
            return {}  # the files are there, and the worker says what is wrong with them
        return dict(self._lost(found.servers))

    async def diff(self) -> tuple[differ.Step, ...]:
        """Return what `reload` would do; raises as `reload` does."""
        reading = await self._read_and_prepare()
        verdict = intake.compare(reading, self._facts())
        if isinstance(verdict, intake.Refuse):
            raise ConfigError(verdict.problems)
        if reading.loaded is not None:
            starting = edits.to_run(verdict.steps, self._desired_of)
            self._new_addresses(reading.loaded, starting, self._sockets.try_out)
        return verdict.steps

    def _nudge(self) -> None:
        self._nudged = True
        self._woken.set()

    async def _wait(self) -> None:
        """Wait until something is asked for, or a look at the files is due."""
        if not (self._asked or self._looking):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(self._intake.look_at - self._clock(), 0.0)):
                    await self._woken.wait()
        self._woken.clear()

    async def _look(self) -> None:
        looking, self._looking = self._looking, []
        try:
            await self._look_for_files()
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end what runs
            self._failed(error)
        for waiter in looking:
            if not waiter.done():
                waiter.set_result(None)

    async def _tell(self, event: intake.Event) -> None:
        """Let `intake` decide what *event* leads to, and do that, to the end."""
        if isinstance(event, intake.Asked):
            self._answering += self._asked
            self._asked = []
        due: list[intake.Event] = [event]
        while due:
            now = self._clock()
            try:
                self._intake, effects = intake.step(self._intake, due.pop(0), self._facts(), now)
            except Exception as error:  # noqa: BLE001 - a defect of ours must not end what runs
                self._intake = intake.Intake(self._intake.seen, look_at=now + intake.POLL_S)
                effects = (intake.Refuse(self._failed(error)),)
            for effect in effects:
                due += await self._carry_out(effect)

    async def _carry_out(self, effect: intake.Effect) -> list[intake.Event]:
        """Do what `intake` decided; return what comes of it."""
        match effect:
            case intake.Read():
                if not self._passing:
                    self._passing = True
                    self._busy(True)
                self.status = replace(self.status, last_attempt_at=time.time())
                return [intake.Arrived(await self._reading())]
            case intake.Compare():
                return [intake.Compared(await self._reading())]
            case intake.Doubt(reason):
                self._log.warning("config.pending", reason=reason, confirm_s=intake.CONFIRM_S)
            case intake.Show(steps):
                self._show(steps)
            case intake.Keep(loaded):
                self._end_pass(self._unchanged(loaded))
            case intake.Refuse(problems):
                self._end_pass(self._refuse(problems))
            case intake.Apply():
                self._end_pass(await self._put_in_force(effect))
            case _:
                assert_never(effect)
        return []

    def _end_pass(self, conclusion: Conclusion) -> None:
        self._concluded(conclusion)
        waiters, self._answering = self._answering, []
        for waiter in waiters:
            _answer(waiter, conclusion)
        if self._passing:
            self._passing = False
            reloads = self.status.reloads.counted(conclusion.result, time.time())
            self.status = replace(self.status, reloads=reloads)
            self._busy(False)

    async def _reading(self) -> intake.Reading:
        """Read what is on disk; whatever happens, what runs goes on."""
        try:
            return await self._read_and_prepare()
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end what runs
            return intake.Reading(self._intake.seen, problems=self._failed(error))

    async def _read_and_prepare(self) -> intake.Reading:
        loaded, seen = await self._read()
        still = await asyncio.to_thread(look, tuple(seen)) == seen
        if isinstance(loaded, RejectedError):
            return intake.Reading(seen, still, problems=loaded.problems)
        if loaded.content_hash == self._applied.content_hash and not await self._new_evidence():
            return intake.Reading(seen, still, loaded)
        try:
            return intake.Reading(seen, still, loaded, await self._prepare_again(loaded))
        except ConfigError as error:
            return intake.Reading(seen, still, problems=error.problems)

    def _failed(self, error: Exception) -> tuple[Problem, ...]:
        self._log.exception("config.failed")
        said = f"tqd failed to read this: {error!r}"
        return (Problem(str(self._path), 0, 0, "", said),)

    async def _read(self) -> tuple[Loaded | RejectedError, Look]:
        files = tuple(self._intake.seen)
        return await asyncio.to_thread(_read, self._path, self._environ, files)

    async def _prepare(self, loaded: Loaded) -> Prepared:
        return await asyncio.to_thread(self._prepare_here, loaded, {})

    async def _prepare_again(self, loaded: Loaded) -> Prepared:
        """Prepare *loaded* beside what runs: a model that is loaded may have gone from the disk."""
        return await asyncio.to_thread(self._prepare_here, loaded, self._applied.servers)

    def _prepare_here(self, loaded: Loaded, before: edits.Servers) -> Prepared:
        facts = device.facts(self._state, self._environ)
        return prepare(loaded, state=self._state, on=machine(facts), before=before)

    async def _new_evidence(self) -> bool:
        """Whether `tqd eval --record` has written to the allow-list since it was last read."""
        entries = await asyncio.to_thread(load_allowlist, self._state.allowlist)
        return entries != self._applied.allowlist

    def _show(self, steps: Sequence[differ.Step]) -> None:
        state: ConfigState = "pending" if steps else "applied"
        self.status = replace(self.status, state=state, problems=(), pending=tuple(steps))
        shown = tuple(map(str, steps))
        self._log.info("config.pending", steps=shown)
        self._waiting(shown)

    def _unchanged(self, loaded: Loaded) -> Conclusion:
        self.status = replace(
            self.status,
            state="applied",
            hash_on_disk=loaded.content_hash,
            problems=(),
            pending=(),
        )
        self._log.info("config.unchanged", content_hash=loaded.content_hash[:16])
        return Conclusion("noop", self.status.generation, warnings=loaded.warnings)

    def _refuse(self, problems: tuple[Problem, ...]) -> Conclusion:
        """Keep everything as it is, and say what is wrong, once."""
        news = self.status.state != "rejected" or self.status.problems != problems
        state: ConfigState = "stale" if self.status.state == "stale" else "rejected"
        self.status = replace(
            self.status, state=state, hash_on_disk=None, problems=problems, pending=()
        )
        if news:
            self._log.error("config.rejected", problems=[str(it) for it in problems])
        return Conclusion("rejected", self.status.generation, problems=problems)

    async def _put_in_force(self, edit: intake.Apply) -> Conclusion:
        loaded = edit.loaded
        try:
            self._reserve_addresses(loaded, edits.to_run(edit.steps, self._desired_of))
        except ConfigError as error:
            return self._refuse(error.problems)
        self._loaded = loaded
        try:
            return await self._apply(edit.prepared, self._applied.servers, edit.steps)
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end what runs
            return self._refuse(self._failed(error))

    def _reserve_addresses(self, loaded: Loaded, servers: Sequence[PreparedServer]) -> None:
        """Hold every address that is new in this edit, before anything is stopped for it."""
        try:
            self._new_addresses(loaded, servers, self._sockets.reserve)
        except ConfigError:
            self._sockets.settle()
            raise

    def _new_addresses(
        self,
        loaded: Loaded,
        servers: Sequence[PreparedServer],
        claim: Callable[[Address], None],
    ) -> None:
        """Let *claim* see every address that is new in this edit; raises what it refuses, at its key."""
        problems = []
        for server in edits.newly_addressed(servers, self._applied.servers):
            try:
                claim(edits.address(server))
            except AddressTakenError as error:
                source = loaded.sources[server.name]
                problems.append(source.problem("port", error.message, error.hint))
        if problems:
            raise ConfigError(problems)

    async def _apply(
        self, prepared: Prepared, before: edits.Servers, steps: Sequence[differ.Step]
    ) -> Conclusion:
        """Put *prepared* in force in the place of *before*, by *steps*."""
        changes = edits.changes(steps, before, prepared.servers, self._desired_of)
        await self._submit(prepared, changes)
        self._sockets.settle()
        self._desired.forget(before.keys() - prepared.servers.keys())
        saved = await asyncio.to_thread(
            self._last_good.save, self._path, prepared.files, prepared.content_hash
        )
        if not saved:
            self._log.warning("config.not_saved", path=str(self._state.last_good))
        warnings = (*prepared.warnings, *dict(self._lost(prepared.servers)).values())
        self.status = replace(
            self.status,
            state="applied",
            hash_on_disk=prepared.content_hash,
            hash_applied=prepared.content_hash,
            applied_at=time.time(),
            generation=self.status.generation + 1,
            problems=(),
            warnings=tuple(map(str, warnings)),
            pending=(),
        )
        if warnings:
            self._log.warning("config.loaded", warnings=list(self.status.warnings))
        self._log.info("plan.applied", steps=[str(step) for step in steps])
        return Conclusion("applied", self.status.generation, tuple(steps), warnings=warnings)

    def _lost(self, servers: edits.Servers) -> Iterator[tuple[str, Problem]]:
        """Yield why servers that run could not start again, by name: files are gone."""
        for server in edits.unrepeatable(servers, self._reconciler.fleet):
            if (blocked := server.blocked) is not None:
                message = f"{blocked.message}; its worker goes on, and no other could start"
                source = self._loaded.sources[server.name]
                yield server.name, source.problem(blocked.key, message, "put it back")

    async def _submit(
        self, prepared: Prepared, changes: tuple[plan.Remove | plan.Put | plan.Adjust, ...]
    ) -> None:
        self._applied = prepared
        daemon = prepared.daemon
        event = plan.Apply(changes, daemon.max_parallel_loads, prepared.budget_bytes)
        await self._reconciler.submit(event, Wanted(prepared.servers, daemon, prepared.machine))
        self._adopted(daemon)

    def _facts(self) -> intake.Facts:
        return intake.Facts(self._applied, self._reconciler.fleet, self._desired_of)

    def _desired_of(self, server: PreparedServer) -> Desired:
        return self._desired.of(server.name, server.spec)

    async def _look_for_files(self) -> None:
        """Let servers start whose model, or other file, has appeared since."""
        lacking = [it.name for it in self._applied.servers.values() if it.blocked is not None]
        if not (lacking or self._blocked()):
            return
        try:
            found = await self._prepare_again(self._loaded)
        except ConfigError as error:
            for name in self._blocked():
                cause = Cause("model_fault", str(error))
                self._reconciler.post(name, events.Block(cause))
            return
        freed = edits.freed(found.servers, self._applied.servers, self._reconciler.fleet)
        if freed:
            servers = {**self._applied.servers, **{it.name: it for it in freed}}
            awakened = edits.awakened(freed, self._reconciler.fleet, self._desired_of)
            await self._submit(replace(self._applied, servers=servers), awakened)

    def _blocked(self) -> list[str]:
        servers = self._reconciler.fleet.servers.values()
        names = [
            it.name
            for it in servers
            if it.state is State.BLOCKED and it.cause and it.cause.code != NO_MEMORY
        ]
        return [name for name in names if name in self._applied.servers]


def _right(loaded: Loaded | RejectedError) -> Loaded:
    if isinstance(loaded, RejectedError):
        raise loaded
    return loaded


def _answer(waiter: asyncio.Future[Conclusion], conclusion: Conclusion) -> None:
    if waiter.done():
        return  # whoever asked has gone
    if conclusion.result == "rejected":
        waiter.set_exception(ConfigError(conclusion.problems))
        waiter.exception()  # asked by nobody in particular: no complaint that it was never looked at
    else:
        waiter.set_result(conclusion)


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
