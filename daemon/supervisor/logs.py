"""Write the servers' logs: output of workers into files that rotate, without ever holding a worker up.

The event loop reads the pipes and hands the bytes to one writer thread through a bounded queue. When
the disk is slower than the workers, or full, output is dropped and counted; workers never wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue

from daemon.supervisor.files import make_private
from daemon.supervisor.rotation import Compressor, Rotation, rotate

QUEUE_CHUNKS = 1024  # of at most 64 KiB each: how far a slow disk may lag behind
MAX_TAIL_LINE = 4096  # bytes that `Tail` keeps of one line


@dataclass(slots=True)
class Tail:
    """The last *lines* lines of a stream of bytes."""

    lines: int
    _done: deque[str] = field(default_factory=deque)
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        """Take in more of the stream."""
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_TAIL_LINE:]
        self._done.extend(line[-MAX_TAIL_LINE:].decode(errors="replace") for line in whole)
        while len(self._done) > self.lines:
            self._done.popleft()

    def __iter__(self) -> Iterator[str]:
        rest = [self._rest.decode(errors="replace")] if self._rest else []
        return iter([*self._done, *rest][-self.lines :])


class LogWriter:
    """Appends to log files from a thread of its own; `write` returns at once, always."""

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self._queue: Queue[tuple[Path, bytes] | None] = Queue(QUEUE_CHUNKS)
        # two counters, because each has one thread that writes to it
        self._refused: Counter[Path] = Counter()
        self._failed: Counter[Path] = Counter()
        self._compressor = Compressor()
        self._thread = threading.Thread(target=self._run, name="tqd-log-writer", daemon=True)
        self._thread.start()

    def write(self, path: Path, data: bytes) -> None:
        """Append *data* to the file *path*, soon; drop it when the disk is too far behind."""
        try:
            self._queue.put_nowait((path, data))
        except Full:
            self._refused[path] += len(data)

    def mark(self, path: Path, text: str) -> None:
        """Append a line about the server itself, such as the start of a launch, with the time."""
        self.write(path, _marker(text))

    def dropped_bytes(self, path: Path) -> int:
        """Return how much output of *path* was lost because the disk was slow, full or away."""
        return self._refused[path] + self._failed[path]

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued and end the threads; give up after *timeout_s*."""
        with contextlib.suppress(Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        self._compressor.close(timeout_s)

    def _run(self) -> None:
        files: dict[Path, _LogFile] = {}
        told: Counter[Path] = Counter()
        while (item := self._queue.get()) is not None:
            path, data = item
            file = files.setdefault(path, _LogFile(path, self._compressor))
            try:
                if lost := self.dropped_bytes(path) - told[path]:
                    file.append(_marker(f"{lost} bytes were lost near here"), self.rotation)
                    told[path] += lost
                file.append(data, self.rotation)
            except OSError:
                self._failed[path] += len(data)
        for file in files.values():
            file.close()


class LogStream:
    """A log file as something to print to, for the daemon's own log."""

    def __init__(self, path: Path, writer: LogWriter) -> None:
        self._path = path
        self._writer = writer
        self._line = ""

    def write(self, text: str) -> int:
        """Take in *text*; a line is written when it is complete."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._writer.write(self._path, f"{line}\n".encode())
        return len(text)

    def flush(self) -> None:
        """Nothing waits here."""

    def isatty(self) -> bool:
        """A file is no terminal."""
        return False


class _LogFile:
    """One log file, reopened whenever somebody moved or removed it."""

    def __init__(self, path: Path, compressor: Compressor) -> None:
        self._path = path
        self._compressor = compressor
        self._fd: int | None = None

    def append(self, data: bytes, rotation: Rotation) -> None:
        fd = self._current()
        size = os.fstat(fd).st_size
        if size and size + len(data) > rotation.max_size:
            self.close()
            rotate(self._path, rotation.backups)
            self._compressor.tidy(self._path)
            fd = self._current()
        while data:
            data = data[os.write(fd, data) :]

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _current(self) -> int:
        if self._fd is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                    return self._fd
            self.close()
        make_private(self._path.parent)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return self._fd


def _marker(text: str) -> bytes:
    moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f"--- {text} at {moment} ---\n".encode()
