"""Turn what is in servers.yaml into what is wanted, again and again, without losing what runs.

daemon.supervisor.intake decides when to read and what becomes of a reading; this module looks at the
files, has them read (daemon.supervisor.reader), and hands an edit on whole (daemon.supervisor.in_force).
Whatever is wrong refuses the whole edit and disturbs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import assert_never

from daemon.config import diff as differ
from daemon.config.load import Loaded, RejectedError
from daemon.config.spec import DaemonSpec
from daemon.errors import ConfigError, Problem, TqdError
from daemon.log import get_logger
from daemon.paths import StateDir
from daemon.supervisor import intake
from daemon.supervisor.conclusions import Conclusion, ConfigStatus
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.in_force import InForce
from daemon.supervisor.last_good import LastGood
from daemon.supervisor.reader import Reader
from daemon.supervisor.reconcile import Reconciler
from daemon.supervisor.sockets import Sockets
from daemon.supervisor.watch import FolderWatch, look


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
        self._clock = clock
        self._reconciler = reconciler
        self._busy = busy
        self._concluded = concluded
        self._waiting = waiting
        self._last_good = LastGood(state.last_good, environ)
        self._reader = Reader(path, environ, state)
        self._in_force = InForce(
            reader=self._reader,
            reconciler=reconciler,
            sockets=sockets,
            desired=desired,
            last_good=self._last_good,
            adopted=adopted,
        )
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
        return self._in_force.loaded

    async def read_first(self) -> DaemonSpec:
        """Read what is on disk, or the last good configuration when that is broken; start nothing yet.

        Raises:
            ConfigError: it is broken, and there is no last good one.
        """
        self.status = self.status.attempted(time.time())
        try:
            found, seen = await self._reader.read(tuple(self._intake.seen))
            self._intake = intake.Intake(seen)
            loaded = _right(found)
            applied = await self._reader.prepare(loaded, {})
        except ConfigError as error:
            kept = await asyncio.to_thread(self._last_good.load, self._reader.path)
            if kept is None:
                raise
            try:
                loaded, applied = kept, await self._reader.salvage(kept)
            except ConfigError:
                raise error from None  # what is wrong with the file that the user has written
            self.status = self.status.stale(error.problems)
        self._in_force.begin(loaded, applied)
        return applied.daemon

    async def start_first(self) -> None:
        """Start what `read_first` has found."""
        faults = self.status.problems
        loaded, applied = self._in_force.loaded, self._in_force.applied
        steps = differ.diff({}, applied.servers)
        warnings = await self._in_force.put(loaded, applied, {}, steps)
        self._concluded(self._in_effect(applied.content_hash, steps, warnings))
        if faults:
            self.status = self.status.stale(faults)
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
        return await self._in_force.lost()

    async def diff(self) -> tuple[differ.Step, ...]:
        """Return what `reload` would do; raises as `reload` does."""
        seen = tuple(self._intake.seen)
        reading = await self._reader.reading(seen, self._in_force.applied)
        verdict = intake.compare(reading, self._in_force.facts())
        if isinstance(verdict, intake.Refuse):
            raise ConfigError(verdict.problems)
        if reading.loaded is not None:
            self._in_force.try_addresses(reading.loaded, verdict.steps)
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
            await self._in_force.look_for_files()
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
                self._intake, effects = intake.step(
                    self._intake, due.pop(0), self._in_force.facts(), now
                )
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
                self.status = self.status.attempted(time.time())
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
            self.status = self.status.counted(conclusion.result, time.time())
            self._busy(False)

    async def _reading(self) -> intake.Reading:
        """Read what is on disk; whatever happens, what runs goes on."""
        try:
            seen = tuple(self._intake.seen)
            return await self._reader.reading(seen, self._in_force.applied)
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end what runs
            return intake.Reading(self._intake.seen, problems=self._failed(error))

    def _failed(self, error: Exception) -> tuple[Problem, ...]:
        self._log.exception("config.failed")
        said = f"tqd failed to read this: {error!r}"
        return (Problem(str(self._reader.path), 0, 0, "", said),)

    def _show(self, steps: Sequence[differ.Step]) -> None:
        self.status = self.status.waiting(steps)
        shown = tuple(map(str, steps))
        self._log.info("config.pending", steps=shown)
        self._waiting(shown)

    def _unchanged(self, loaded: Loaded) -> Conclusion:
        self.status = self.status.unchanged(loaded.content_hash)
        self._log.info("config.unchanged", content_hash=loaded.content_hash[:16])
        return Conclusion("noop", self.status.generation, warnings=loaded.warnings)

    def _refuse(self, problems: tuple[Problem, ...]) -> Conclusion:
        """Keep everything as it is, and say what is wrong, once."""
        news = self.status.state != "rejected" or self.status.problems != problems
        self.status = self.status.refused(problems)
        if news:
            self._log.error("config.rejected", problems=[str(it) for it in problems])
        return Conclusion("rejected", self.status.generation, problems=problems)

    async def _put_in_force(self, edit: intake.Apply) -> Conclusion:
        before = self._in_force.applied.servers
        try:
            self._in_force.reserve_addresses(edit.loaded, edit.steps)
        except ConfigError as error:
            return self._refuse(error.problems)
        try:
            warnings = await self._in_force.put(edit.loaded, edit.prepared, before, edit.steps)
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end what runs
            return self._refuse(self._failed(error))
        return self._in_effect(edit.prepared.content_hash, edit.steps, warnings)

    def _in_effect(
        self, content_hash: str, steps: Sequence[differ.Step], warnings: tuple[Problem, ...]
    ) -> Conclusion:
        self.status = self.status.applied(content_hash, warnings, time.time())
        if warnings:
            self._log.warning("config.loaded", warnings=list(self.status.warnings))
        self._log.info("plan.applied", steps=[str(step) for step in steps])
        return Conclusion("applied", self.status.generation, tuple(steps), warnings=warnings)


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
