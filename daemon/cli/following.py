"""Read the end of a log file, and follow it by name through rotation and restarts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK = 65536
POLL_S = 0.25


def last_lines(file: BinaryIO, count: int) -> bytes:
    """Return the last *count* lines of *file* and leave it at its end; reads no more than that takes."""
    end = position = file.seek(0, os.SEEK_END)
    blocks: list[bytes] = []
    # one line end more than lines: the last line has one too
    while position > 0 and sum(block.count(b"\n") for block in blocks) <= count:
        size = min(BLOCK, position)
        position -= size
        file.seek(position)
        blocks.insert(0, file.read(size))
    file.seek(end)
    lines = b"".join(blocks).splitlines(keepends=True)
    return b"".join(lines[-count:]) if count else b""


def follow(
    path: Path, file: BinaryIO, pause: Callable[[float], None] = time.sleep
) -> Iterator[bytes]:
    """Yield what is added to *path* after the position of *file*, whatever file has that name by then.

    *file* is closed at the end.
    """
    try:
        while True:
            if data := file.read(BLOCK):
                yield data
                continue
            at = _stat(path)
            if at is not None and not os.path.samestat(at, os.fstat(file.fileno())):
                yield file.read()  # written between the last read and the rotation
                file.close()
                file = path.open("rb")
            elif at is not None and at.st_size < file.tell():
                file.seek(0)  # emptied in place
            else:
                pause(POLL_S)
    finally:
        file.close()


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
