"""Read servers.yaml and prepare what it says, in threads: the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from daemon.config.load import Loaded, RejectedError, load
from daemon.config.machine import Machine, machine
from daemon.config.prepare import Prepared, prepare, salvage
from daemon.errors import ConfigError
from daemon.paths import StateDir
from daemon.policy.store import load_allowlist
from daemon.supervisor import device, edits
from daemon.supervisor.intake import Look, Reading
from daemon.supervisor.watch import look


class Reader:
    """Reads the configuration in *path*, whose references *environ* resolves."""

    def __init__(self, path: Path, environ: Mapping[str, str], state: StateDir) -> None:
        self.path = path
        self._environ = environ
        self._state = state

    async def read(self, files: Sequence[Path]) -> tuple[Loaded | RejectedError, Look]:
        """Return the configuration, or why there is none, and a look at its files from before they were read.

        *files* are those that it is likely to consist of.
        """
        return await asyncio.to_thread(_read, self.path, self._environ, files)

    async def prepare(self, loaded: Loaded, before: edits.Servers) -> Prepared:
        """Prepare *loaded* beside what runs: a model that is loaded may have gone from the disk.

        Raises:
            ConfigError: a policy or an architecture is at fault.
        """
        return await asyncio.to_thread(
            lambda: prepare(loaded, state=self._state, on=self._machine(), before=before)
        )

    async def salvage(self, loaded: Loaded) -> Prepared:
        """Prepare *loaded*, which was accepted once; a server whose model fits it no more is blocked.

        Raises:
            ConfigError: more than that is at fault.
        """
        return await asyncio.to_thread(
            lambda: salvage(loaded, state=self._state, on=self._machine())
        )

    async def reading(self, files: Sequence[Path], applied: Prepared) -> Reading:
        """Return what the files say, held against what is *applied*."""
        loaded, seen = await self.read(files)
        still = await asyncio.to_thread(look, tuple(seen)) == seen
        if isinstance(loaded, RejectedError):
            return Reading(seen, still, problems=loaded.problems)
        if loaded.content_hash == applied.content_hash and not await self._new_evidence(applied):
            return Reading(seen, still, loaded)
        try:
            return Reading(seen, still, loaded, await self.prepare(loaded, applied.servers))
        except ConfigError as error:
            return Reading(seen, still, problems=error.problems)

    async def _new_evidence(self, applied: Prepared) -> bool:
        """Whether `tqd eval --record` has written to the allow-list since it was last read."""
        return await asyncio.to_thread(load_allowlist, self._state.allowlist) != applied.allowlist

    def _machine(self) -> Machine:
        return machine(device.facts(self._state, self._environ))


def _read(
    path: Path, environ: Mapping[str, str], files: Sequence[Path]
) -> tuple[Loaded | RejectedError, Look]:
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
