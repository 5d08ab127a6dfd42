"""What of servers.yaml is in force, and how an edit takes its place: addresses first, then the fleet, then the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from daemon.config.diff import Step
from daemon.config.load import Loaded
from daemon.config.prepare import Prepared, PreparedServer
from daemon.config.spec import DaemonSpec
from daemon.errors import ConfigError, Problem
from daemon.log import get_logger
from daemon.supervisor import edits, events, intake, plan
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.last_good import LastGood
from daemon.supervisor.reader import Reader
from daemon.supervisor.reconcile import Reconciler, Wanted
from daemon.supervisor.server import Address, Cause, Desired
from daemon.supervisor.sockets import AddressTakenError, Sockets

Servers = edits.Servers


class InForce:
    """The configuration that the reconciler follows; *adopted* is told which daemon block that has."""

    loaded: Loaded
    """As its files say it."""
    applied: Prepared

    def __init__(
        self,
        *,
        reader: Reader,
        reconciler: Reconciler,
        sockets: Sockets,
        desired: DesiredState,
        last_good: LastGood,
        adopted: Callable[[DaemonSpec], None],
    ) -> None:
        self._reader = reader
        self._reconciler = reconciler
        self._sockets = sockets
        self._desired = desired
        self._last_good = last_good
        self._adopted = adopted
        self._log = get_logger()

    def facts(self) -> intake.Facts:
        """Return what a reading is held against."""
        return intake.Facts(self.applied, self._reconciler.fleet, self._desired_of)

    def reserve_addresses(self, loaded: Loaded, steps: Sequence[Step]) -> None:
        """Hold every address that is new in this edit, before anything is stopped for it.

        Raises:
            ConfigError: some cannot be had; none is held then.
        """
        try:
            self._new_addresses(loaded, steps, self._sockets.reserve)
        except ConfigError:
            self._sockets.settle()
            raise

    def try_addresses(self, loaded: Loaded, steps: Sequence[Step]) -> None:
        """Make sure that `reserve_addresses` would succeed, and raise as it does; nothing is held."""
        self._new_addresses(loaded, steps, self._sockets.try_out)

    def begin(self, loaded: Loaded, prepared: Prepared) -> None:
        """Take *prepared* for what is in force, though nothing of it runs yet."""
        self.loaded, self.applied = loaded, prepared

    async def put(
        self, loaded: Loaded, prepared: Prepared, before: Servers, steps: Sequence[Step]
    ) -> tuple[Problem, ...]:
        """Put *prepared* in force in the place of *before*, by *steps*; return warnings about it."""
        changes = edits.changes(steps, before, prepared.servers, self._desired_of)
        self.loaded, self.applied = loaded, prepared
        await self._submit(changes)
        self._sockets.settle()
        self._desired.forget(before.keys() - prepared.servers.keys())
        saved = await asyncio.to_thread(
            self._last_good.save, self._reader.path, prepared.files, prepared.content_hash
        )
        if not saved:
            self._log.warning("config.not_saved", path=str(self._last_good.root))
        return (*prepared.warnings, *dict(self._lost(prepared.servers)).values())

    async def lost(self) -> Mapping[str, Problem]:
        """Look for the files of what runs; return why servers could not start again, by name."""
        try:
            found = await self._reader.prepare(self.loaded, self.applied.servers)
        except ConfigError:
            return {}  # the files are there, and the worker says what is wrong with them
        return dict(self._lost(found.servers))

    async def look_for_files(self) -> None:
        """Let servers start whose model, or other file, has appeared since."""
        lacking = any(it.blocked is not None for it in self.applied.servers.values())
        if not (lacking or self._blocked()):
            return
        try:
            found = await self._reader.prepare(self.loaded, self.applied.servers)
        except ConfigError as error:
            for name in self._blocked():
                cause = Cause("model_fault", str(error))
                self._reconciler.post(name, events.Block(cause))
            return
        freed = edits.freed(found.servers, self.applied.servers, self._reconciler.fleet)
        if freed:
            servers = {**self.applied.servers, **{it.name: it for it in freed}}
            self.applied = replace(self.applied, servers=servers)
            await self._submit(edits.awakened(freed, self._reconciler.fleet, self._desired_of))

    def _new_addresses(
        self, loaded: Loaded, steps: Sequence[Step], claim: Callable[[Address], None]
    ) -> None:
        """Let *claim* see every address that is new by *steps*; raises what it refuses, at its key."""
        problems = []
        starting = edits.to_run(steps, self._desired_of)
        for server in edits.newly_addressed(starting, self.applied.servers):
            try:
                claim(edits.address(server))
            except AddressTakenError as error:
                source = loaded.sources[server.name]
                problems.append(source.problem("port", error.message, error.hint))
        if problems:
            raise ConfigError(problems)

    async def _submit(self, changes: tuple[plan.Remove | plan.Put | plan.Adjust, ...]) -> None:
        prepared, daemon = self.applied, self.applied.daemon
        event = plan.Apply(changes, daemon.max_parallel_loads, prepared.budget_bytes)
        await self._reconciler.submit(event, Wanted(prepared.servers, daemon, prepared.machine))
        self._adopted(daemon)

    def _lost(self, servers: Servers) -> Iterator[tuple[str, Problem]]:
        """Yield why servers that run could not start again, by name: files are gone."""
        for server in edits.unrepeatable(servers, self._reconciler.fleet):
            if (blocked := server.blocked) is not None:
                message = f"{blocked.message}; its worker goes on, and no other could start"
                source = self.loaded.sources[server.name]
                yield server.name, source.problem(blocked.key, message, "put it back")

    def _blocked(self) -> list[str]:
        fleet = self._reconciler.fleet
        return [name for name in self.applied.servers if edits.waits_for_files(name, fleet)]

    def _desired_of(self, server: PreparedServer) -> Desired:
        return self._desired.of(server.name, server.spec)
