"""Read a log as one stream: back into its rotated files, and on through rotation and restarts."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from daemon.supervisor.rotation import Rotated, rotated

BLOCK = 65536
POLL_S = 0.25

# where the lines of workers (JSON, or written for people), of the daemon and of launches have their time
_MOMENT = re.compile(
    rb'(?:^|"timestamp": ?"| at )(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d))'
)


class Log:
    """The log *path*, open for reading at its start, and the rotated files that were there then.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:  # until no rotation comes between the two
            self.before = rotated(path)
            self.file = path.open("rb")
            if rotated(path) == self.before:
                return
            self.file.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def last(self, count: int) -> list[bytes]:
        """Return the last *count* lines, and leave the file at its end."""
        found = last_lines(self.file, count)
        for older in reversed(self.before):
            if len(found) >= count:
                break
            try:
                with older.open() as file:
                    found = [*deque(file, maxlen=count - len(found)), *found]
            except FileNotFoundError:
                break  # it was one too many meanwhile, and what is older was before
        return found

    def since(self, moment: datetime) -> Iterator[bytes]:
        """Yield the lines from *moment* on, and leave the file at its end.

        A line without a time, such as one of a traceback, has that of the line before it.
        """
        newer = [it for it in self.before if it.modified() >= moment.timestamp()]
        return _from(moment, self._lines(newer))

    def follow(self, pause: Callable[[float], None] = time.sleep) -> Iterator[bytes]:
        """Yield what is added from here on, for ever, whatever file has the name by then."""
        while True:
            if data := self.file.read(BLOCK):
                yield data
                continue
            at = _stat(self.path)
            if at is None or os.path.samestat(at, os.fstat(self.file.fileno())):
                if at is not None and at.st_size < self.file.tell():
                    self.file.seek(0)  # emptied in place
                else:
                    pause(POLL_S)
                continue
            yield from self._move_on()

    def _lines(self, older: Iterable[Rotated]) -> Iterator[bytes]:
        for it in older:
            try:
                with it.open() as file:
                    yield from file
            except FileNotFoundError:
                continue
        yield from self.file

    def _move_on(self) -> Iterator[bytes]:
        """Yield the rest of this file and every whole one after it; then the newest is open."""
        try:
            newest = Log(self.path)
        except FileNotFoundError:
            return  # between two files
        yield self.file.read()  # written between the last read and the rotation
        self.file.close()
        # the first number that is new to us is the file that was read all along
        known = self.before[-1].number if self.before else 0
        missed = [it for it in newest.before if it.number > known][1:]
        self.before, self.file = newest.before, newest.file
        for it in missed:
            try:
                with it.open() as file:
                    yield file.read()
            except FileNotFoundError:
                continue


def last_lines(file: BinaryIO, count: int) -> list[bytes]:
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
    return lines[-count:] if count else []


def _from(moment: datetime, lines: Iterator[bytes]) -> Iterator[bytes]:
    for line in lines:
        found = _MOMENT.search(line)
        if found and datetime.fromisoformat(found[1].decode()) >= moment:
            yield line
            break
    yield from lines


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
