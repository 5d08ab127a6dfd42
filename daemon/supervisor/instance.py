"""One daemon per state folder: a lock that the kernel gives back, however the daemon ends."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from daemon.errors import TqdError
from daemon.paths import StateDir
from daemon.supervisor.files import make_private


class AlreadyRunningError(TqdError):
    """Another daemon has this state folder."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The daemon that holds the lock."""

    pid: int
    control: Path


class Instance:
    """The lock of *state*, held until the process ends."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            AlreadyRunningError: another daemon has it.
            TqdError: the state folder cannot be made or written to.
        """
        try:
            make_private(self._state.root)
            fd = os.open(self._state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TqdError(
                f"the state folder {self._state.root} cannot be used: {error.strerror}",
                hint="make it writable, or name another with --state-dir",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            owner = _read(self._state.lock)
            who = f" with pid {owner.pid}" if owner else ""
            raise AlreadyRunningError(
                f"a daemon already runs{who} for {self._state.root}",
                hint="`tqd status` shows it; another --state-dir is another daemon",
            ) from error
        self._fd = fd
        self.announce(self._state.socket)

    def announce(self, control: Path) -> None:
        """Leave word in the lock of who holds it, and where that daemon listens."""
        if self._fd is not None:
            word = json.dumps({"pid": os.getpid(), "control": str(control)}).encode()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, word, 0)

    def release(self) -> None:
        """Give the lock back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def holder(state: StateDir) -> Holder | None:
    """Return the daemon that holds the lock of *state* now, or None."""
    try:
        fd = os.open(state.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # a shared lock, tried and given back at once: two askers do not mistake each other for a daemon
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(state.lock)
    else:
        return None
    finally:
        os.close(fd)


def _read(path: Path) -> Holder | None:
    try:
        document = json.loads(path.read_bytes())
        return Holder(int(document["pid"]), Path(document["control"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
