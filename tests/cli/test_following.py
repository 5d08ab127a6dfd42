from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from daemon.cli.following import BLOCK, Log, last_lines
from daemon.supervisor.rotation import rotate, rotated


@pytest.mark.parametrize(
    ("content", "count", "expected"),
    [
        (b"", 3, []),
        (b"a\nb\nc\n", 2, [b"b\n", b"c\n"]),
        (b"a\nb\nc\n", 9, [b"a\n", b"b\n", b"c\n"]),
        (b"a\nb\nc", 1, [b"c"]),
        (b"a\n", 0, []),
        (b"x" * BLOCK + b"\nlast\n", 1, [b"last\n"]),
        (b"first\n" + b"y" * (2 * BLOCK) + b"\n", 1, [b"y" * (2 * BLOCK) + b"\n"]),
    ],
)
def test_the_last_lines_come_out_whole(
    tmp_path: Path, content: bytes, count: int, expected: list[bytes]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with path.open("rb") as file:
        assert last_lines(file, count) == expected
        assert file.tell() == len(content)


def append(path: Path, text: bytes) -> Callable[[], object]:
    def happen() -> None:
        with path.open("ab") as file:
            file.write(text)

    return happen


def rotation(path: Path, *, compressed: bool = False) -> Callable[[], object]:
    def happen() -> None:
        rotate(path, backups=9)
        if compressed:
            it = rotated(path)[-1]
            modified = it.plain.stat().st_mtime
            it.compressed.write_bytes(gzip.compress(it.plain.read_bytes()))
            os.utime(it.compressed, (modified, modified))
            it.plain.unlink()

    return happen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of lines 1 to 6, two in each file: compressed, rotated, current."""
    path = tmp_path / "log"
    append(path, b"1\n2\n")()
    rotation(path, compressed=True)()
    append(path, b"3\n4\n")()
    rotation(path)()
    append(path, b"5\n6\n")()
    return path


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, b""),
        (1, b"6\n"),
        (3, b"4\n5\n6\n"),
        (5, b"2\n3\n4\n5\n6\n"),
        (99, b"1\n2\n3\n4\n5\n6\n"),
    ],
)
def test_the_last_lines_reach_into_rotated_and_compressed_files(
    path: Path, count: int, expected: bytes
) -> None:
    with Log(path) as log:
        assert b"".join(log.last(count)) == expected


def test_a_rotated_file_that_is_removed_meanwhile_ends_the_way_back(path: Path) -> None:
    with Log(path) as log:
        log.before[0].remove()
        assert b"".join(log.last(99)) == b"3\n4\n5\n6\n"


def at(hour: int) -> datetime:
    return datetime(2026, 1, 31, hour, tzinfo=UTC)


def test_since_finds_the_time_in_every_kind_of_line_and_keeps_what_has_none(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [
        b"--- launch 1 pid 7 spec ab at 2026-01-31T01:00:00.000Z ---\n",
        b'{"event": "model.loading", "level": "info", "timestamp": "2026-01-31T02:00:00.5Z"}\n',
        b"Traceback (most recent call last):\n",
        b"2026-01-31T03:00:00Z [info ] model.loaded\n",
        b"a line of a library\n",
        b"--- launch 1 pid 7 ended with code 1 at 2026-01-31T04:00:00.000Z ---\n",
    ]
    path.write_bytes(b"".join(lines))
    for hour, first in ((0, 0), (1, 0), (2, 1), (3, 3), (4, 5), (5, 6)):
        with Log(path) as log:
            assert list(log.since(at(hour))) == lines[first:]


def test_since_reads_rotated_files_and_passes_over_those_that_are_too_old(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for hour, compressed in ((1, True), (2, True), (3, False)):
        append(path, b'{"timestamp": "2026-01-31T%02d:00:00Z"}\n' % hour)()
        os.utime(path, (at(hour).timestamp(), at(hour).timestamp()))
        rotation(path, compressed=compressed)()
    path.write_bytes(b"rest\n")
    rotated(path)[0].compressed.write_bytes(b"no gzip file: never read")
    os.utime(rotated(path)[0].compressed, (at(1).timestamp(), at(1).timestamp()))
    with Log(path) as log:
        assert b"".join(log.since(at(2))) == (
            b'{"timestamp": "2026-01-31T02:00:00Z"}\n{"timestamp": "2026-01-31T03:00:00Z"}\nrest\n'
        )


def followed(path: Path, *happenings: Callable[[], object]) -> bytes:
    """Return what `follow` yields while one happening after another takes place."""
    pending = list(happenings)

    class EnoughError(Exception):
        pass

    def pause(seconds: float) -> None:
        if not pending:
            raise EnoughError
        pending.pop(0)()

    found: list[bytes] = []
    with Log(path) as log, pytest.raises(EnoughError):
        found.extend(log.follow(pause))
    return b"".join(found)


@pytest.mark.parametrize("compressed", [False, True])
def test_what_is_added_comes_through_a_rotation_completely(
    tmp_path: Path, compressed: bool
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1\n")

    def happen() -> None:
        append(path, b"3\n")()
        rotation(path, compressed=compressed)()
        append(path, b"4\n")()

    assert followed(path, append(path, b"2\n"), happen, append(path, b"5\n")) == (
        b"1\n2\n3\n4\n5\n"
    )


def test_several_rotations_between_two_looks_lose_nothing(path: Path) -> None:
    def happen() -> None:
        for number, compressed in ((7, False), (8, True), (9, False)):
            append(path, b"%d\n" % number)()
            rotation(path, compressed=compressed)()
        append(path, b"10\n")()

    assert followed(path, happen, append(path, b"11\n")) == b"5\n6\n7\n8\n9\n10\n11\n"


def test_a_file_that_is_away_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1\n")
    assert followed(path, path.unlink, lambda: path.write_bytes(b"2\n")) == b"1\n2\n"


def test_a_file_that_is_emptied_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"long enough\n")
    assert followed(path, lambda: path.write_bytes(b"new\n")) == b"long enough\nnew\n"
