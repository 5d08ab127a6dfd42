"""Rotated logs: how they are named, how many are kept, and the thread that compresses them.

``chat.log`` becomes ``chat.log.7``, then ``chat.log.7.gz``; the highest number is the newest. Numbers only grow, so
that a name never means another file than before: who compresses and who reads need no lock, and a
crash leaves at worst a ``.part`` that the next round removes, or a file in both forms.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, cast

_PART = ".part"
_LEVEL = 6  # zlib's own default: twice as fast as 9, for a few percent


@dataclass(frozen=True, slots=True)
class Rotation:
    """When a log is rotated, and how many rotated files are kept."""

    max_size: int
    backups: int


@dataclass(frozen=True, slots=True)
class Rotated:
    """One rotated file of *log*, whichever form it has."""

    log: Path
    number: int

    @property
    def plain(self) -> Path:
        """Its path as it was written."""
        return self.log.with_name(f"{self.log.name}.{self.number}")

    @property
    def compressed(self) -> Path:
        """Its path once it is compressed."""
        return self.log.with_name(f"{self.log.name}.{self.number}.gz")

    def modified(self) -> float:
        """Return when it was last written to, in seconds since the epoch; inf once it is gone."""
        for path in (self.compressed, self.plain):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_mtime
        return float("inf")

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open it for reading what was written.

        Raises:
            FileNotFoundError: it is one too many by now.
        """
        with contextlib.ExitStack() as files:
            try:
                file: BinaryIO = files.enter_context(self.plain.open("rb"))
            except FileNotFoundError:
                file = cast("BinaryIO", files.enter_context(gzip.open(self.compressed, "rb")))
            yield file

    def remove(self) -> None:
        """Remove it in every form."""
        for path in (self.plain, self.compressed):
            path.unlink(missing_ok=True)


def rotated(log: Path) -> list[Rotated]:
    """Return the rotated files of *log*, the oldest first."""
    pattern = re.compile(re.escape(log.name) + r"\.(\d{1,18})(\.gz)?")
    try:
        matches = [pattern.fullmatch(name) for name in os.listdir(log.parent)]  # noqa: PTH208 - names, no paths
    except FileNotFoundError:
        return []
    return [Rotated(log, number) for number in sorted({int(it[1]) for it in matches if it})]


def rotate(log: Path, backups: int) -> None:
    """Give *log* the next number, and remove what is more than *backups* files."""
    before = rotated(log)
    if backups:
        log.replace(Rotated(log, before[-1].number + 1 if before else 1).plain)
    else:
        log.unlink()
    for old in before[: max(len(before) + 1 - backups, 0)]:
        old.remove()


class Compressor:
    """Compresses rotated logs, one after another, in a thread that begins with the first of them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Path | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def tidy(self, log: Path) -> None:
        """Compress the rotated files of *log* that are not yet, soon."""
        self._queue.put(log)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="tqd-log-compressor", daemon=True
            )
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread; what is not done after *timeout_s* is done by the next daemon."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (log := self._queue.get()) is not None:
            for it in rotated(log):
                # a full disk, or a file that was one too many meanwhile: it stays as it is
                with contextlib.suppress(OSError):
                    _compress(it)


def _compress(it: Rotated) -> None:
    part = it.compressed.with_name(it.compressed.name + _PART)
    if it.compressed.exists():  # complete, or it would have another name
        it.plain.unlink(missing_ok=True)
        return
    try:
        with it.plain.open("rb") as source:
            original = os.fstat(source.fileno())
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with (
                os.fdopen(fd, "wb") as file,
                gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed,
            ):
                shutil.copyfileobj(source, packed)
                packed.close()
                file.flush()
                os.fsync(fd)  # only a copy that is on the disk may replace the original
        os.utime(part, ns=(original.st_atime_ns, original.st_mtime_ns))
        part.replace(it.compressed)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(original, it.plain.stat()):
            it.plain.unlink()
            return
    it.compressed.unlink(missing_ok=True)  # the original was one too many meanwhile
