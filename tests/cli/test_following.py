from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.cli.following import BLOCK, follow, last_lines


@pytest.mark.parametrize(
    ("content", "count", "expected"),
    [
        (b"", 3, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
        (b"a\nb\nc", 1, b"c"),
        (b"a\n", 0, b""),
        (b"x" * BLOCK + b"\nlast\n", 1, b"last\n"),
        (b"first\n" + b"y" * (2 * BLOCK) + b"\n", 1, b"y" * (2 * BLOCK) + b"\n"),
    ],
)
def test_the_last_lines_come_out_whole(
    tmp_path: Path, content: bytes, count: int, expected: bytes
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with path.open("rb") as file:
        assert last_lines(file, count) == expected
        assert file.tell() == len(content)


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
    with pytest.raises(EnoughError):
        found.extend(follow(path, path.open("rb"), pause))
    return b"".join(found)


def append(path: Path, text: bytes) -> Callable[[], object]:
    def happen() -> None:
        with path.open("ab") as file:
            file.write(text)

    return happen


def test_what_is_added_comes_through_a_rotation_completely(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1\n")

    def rotate() -> None:
        append(path, b"3\n")()
        path.rename(tmp_path / "log.1")
        path.write_bytes(b"4\n")

    assert followed(path, append(path, b"2\n"), rotate, append(path, b"5\n")) == (
        b"1\n2\n3\n4\n5\n"
    )


def test_a_file_that_is_away_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1\n")
    assert followed(path, path.unlink, lambda: path.write_bytes(b"2\n")) == b"1\n2\n"


def test_a_file_that_is_emptied_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"long enough\n")
    assert followed(path, lambda: path.write_bytes(b"new\n")) == b"long enough\nnew\n"
