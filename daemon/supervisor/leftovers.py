"""Know the workers of an earlier daemon by identity, and end those that do not end by themselves.

``workers.json`` holds pid and start time of every worker, and the number of every server's last launch:
numbers go on where an earlier daemon stopped. After a crash of the daemon its workers
notice the end of the lease and exit; the next daemon waits for that before it launches anything of
the same name, and helps those that are deaf.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from daemon.log import get_logger
from daemon.supervisor.files import read_json, write_private

# A worker drains for at most ten seconds after the lease has ended.
LEASE_DRAIN_S = 12.0
POLL_S = 0.1
# Start times are told against the moment of booting, in whole seconds of a wall clock that is corrected now and then.
SAME_START_S = 2.5


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, unmistakably: its pid may be used again, its start time not."""

    name: str
    pid: int
    started: float
    nonce: str

    def alive(self) -> bool:
        """Whether this very process still runs."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return abs(process.create_time() - self.started) < SAME_START_S
        except psutil.Error:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Send *number* to the process, or to its whole group when it is SIGKILL."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send = os.killpg if number is signal.SIGKILL else os.kill
                send(self.pid, number)


class Register:
    """The workers of this daemon, kept in *path* for the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._workers: dict[str, Identity] = {}
        document = read_json(path)
        self._found = document if isinstance(document, dict) else {}
        launches = self._found.get("launches")
        self._launches = {
            name: number
            for name, number in (launches.items() if isinstance(launches, dict) else ())
            if isinstance(number, int)
        }

    @property
    def launched(self) -> Mapping[str, int]:
        """The number of every server's last launch, by this daemon or an earlier one."""
        return self._launches

    def earlier(self) -> list[Identity]:
        """Return the workers of an earlier daemon that still live."""
        found = []
        entries = self._found.get("workers")
        for entry in entries if isinstance(entries, list) else ():
            with contextlib.suppress(TypeError, AttributeError):
                identity = Identity(**entry)
                if identity.alive():
                    found.append(identity)
        return found

    def add(self, name: str, pid: int, nonce: str, launch: int) -> None:
        """Record a worker that was just spawned."""
        self._launches[name] = launch
        with contextlib.suppress(psutil.Error):  # gone already: nothing to leave behind
            started = psutil.Process(pid).create_time()
            self._workers[name] = Identity(name, pid, started, nonce)
            self._write()

    def keep(self, identity: Identity) -> None:
        """Keep an earlier daemon's worker on record while it lives."""
        self._workers.setdefault(identity.name, identity)
        self._write()

    def drop(self, pid: int) -> None:
        """Forget a worker that is gone."""
        self._workers = {name: it for name, it in self._workers.items() if it.pid != pid}
        self._write()

    def _write(self) -> None:
        workers = [asdict(it) for it in self._workers.values()]
        document = {"workers": workers, "launches": self._launches}
        try:
            write_private(self._path, json.dumps(document).encode())
        except OSError as error:  # a full disk: the lease still ends these workers with the daemon
            get_logger().error("state.not_written", path=str(self._path), error=error.strerror)


async def see_out(identity: Identity, *, grace_s: float) -> str:
    """Wait until *identity* is gone, ending it if it must be; return how it went.

    It gets the time of its lease to drain, then SIGTERM, then *grace_s*, then SIGKILL.
    """
    if await _gone_within(identity, LEASE_DRAIN_S):
        return "by itself"
    identity.signal(signal.SIGTERM)
    if await _gone_within(identity, grace_s):
        return "SIGTERM"
    while identity.alive():
        identity.signal(signal.SIGKILL)
        await asyncio.sleep(POLL_S)
    return "SIGKILL"


async def _gone_within(identity: Identity, limit_s: float) -> bool:
    loop = asyncio.get_running_loop()
    until = loop.time() + limit_s
    while identity.alive():
        if loop.time() >= until:
            return False
        await asyncio.sleep(POLL_S)
    return True
