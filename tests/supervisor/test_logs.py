from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.supervisor.logs import LogStream, LogWriter, Tail
from daemon.supervisor.rotation import Rotation, rotated

ROOMY = Rotation(max_size=10**6, backups=2)


def written(path: Path, *chunks: bytes, rotation: Rotation = ROOMY) -> None:
    writer = LogWriter(rotation)
    for chunk in chunks:
        writer.write(path, chunk)
    writer.close(60)


def until(condition: Callable[[], object]) -> None:
    """Wait for what the writer's thread does; for ever is the time limit of the suite."""
    while not condition():
        time.sleep(0.002)


def test_a_tail_keeps_the_last_lines_whatever_the_chunks() -> None:
    tail = Tail(3)
    for chunk in (b"one\ntw", b"o\nthree\n", b"four\nfi", b"ve"):
        tail.feed(chunk)
    assert list(tail) == ["three", "four", "five"]


def test_a_tail_survives_endless_lines_and_broken_text() -> None:
    tail = Tail(2)
    tail.feed(b"\xff\xfe\n" + b"x" * 10**6)
    first, last = tail
    assert first == "\ufffd\ufffd"
    assert len(last) == 4096


def test_a_log_is_private_and_so_is_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "servers" / "chat.log"
    written(path, b"hello\n")
    assert path.read_bytes() == b"hello\n"
    assert [oct(it.stat().st_mode & 0o777) for it in (path, path.parent, path.parent.parent)] == [
        "0o600",
        "0o700",
        "0o700",
    ]


def test_a_log_rotates_at_its_size_and_keeps_so_many_backups(tmp_path: Path) -> None:
    path = tmp_path / "chat.log"
    lines = [f"{number:09}\n".encode() for number in range(10)]
    written(path, *lines, rotation=Rotation(max_size=20, backups=2))
    assert {it.name.removesuffix(".gz") for it in tmp_path.iterdir()} == {
        "chat.log",
        "chat.log.3",
        "chat.log.4",
    }
    kept = b""
    for it in rotated(path):
        with it.open() as file:
            kept += file.read()
    assert kept + path.read_bytes() == b"".join(lines[4:])


def test_no_backups_means_that_the_file_starts_anew(tmp_path: Path) -> None:
    written(tmp_path / "a.log", b"1" * 15, b"2" * 15, rotation=Rotation(max_size=20, backups=0))
    assert [it.read_bytes() for it in tmp_path.iterdir()] == [b"2" * 15]


def test_a_log_that_somebody_moved_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    writer = LogWriter(ROOMY)
    writer.write(path, b"1\n")
    until(path.exists)
    path.rename(tmp_path / "moved")
    writer.write(path, b"2\n")
    writer.close(60)
    assert path.read_bytes() == b"2\n"


def no_folder(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "a.log"


def full_disk(folder: Path) -> Path:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (folder / "a.log").symlink_to("/dev/full")
    return folder / "a.log"


def no_permission(folder: Path) -> Path:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (folder / "a.log").touch(mode=0o400)
    return folder / "a.log"


@pytest.mark.parametrize("spoil", [no_folder, full_disk, no_permission])
def test_output_that_cannot_be_written_is_counted_not_waited_for(
    tmp_path: Path, spoil: Callable[[Path], Path]
) -> None:
    path = spoil(tmp_path)
    writer = LogWriter(ROOMY)
    writer.write(path, b"lost")
    writer.write(tmp_path / "b.log", b"kept")
    writer.close(60)
    assert writer.dropped_bytes(path) == 4
    assert (tmp_path / "b.log").read_bytes() == b"kept"


def test_a_log_says_where_output_was_lost_as_soon_as_it_can_be_written_again(
    tmp_path: Path,
) -> None:
    path = no_folder(tmp_path)
    writer = LogWriter(ROOMY)
    writer.write(path, b"lost")
    until(lambda: writer.dropped_bytes(path))
    path.parent.unlink()
    writer.write(path, b"back\n")
    writer.write(path, b"more\n")
    writer.close(60)
    marker, *lines = path.read_text().splitlines()
    assert marker.startswith("--- 4 bytes were lost near here at 20")
    assert lines == ["back", "more"]


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    writer = LogWriter(ROOMY)
    writer.write(path, b"1\n")
    until(path.exists)
    shutil.rmtree(path.parent)
    writer.write(path, b"2\n")
    writer.close(60)
    assert path.read_bytes() == b"2\n"
    assert writer.dropped_bytes(path) == 0


def test_a_marker_says_when(tmp_path: Path) -> None:
    writer = LogWriter(ROOMY)
    writer.mark(tmp_path / "a.log", "launch 7 pid 42 spec ab12")
    writer.close(60)
    assert re.fullmatch(
        r"--- launch 7 pid 42 spec ab12 at \d{4}-\d\d-\d\dT[\d:.]+Z ---\n",
        (tmp_path / "a.log").read_text(),
    )


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    stuck = threading.Event()
    released = threading.Event()

    class Hanging(LogWriter):
        def _run(self) -> None:
            stuck.set()
            released.wait()
            super()._run()

    writer = Hanging(ROOMY)
    stuck.wait()
    for _ in range(2000):
        writer.write(tmp_path / "a.log", b"x")
    assert writer.dropped_bytes(tmp_path / "a.log") == 2000 - 1024
    released.set()
    writer.close(60)
    assert (tmp_path / "a.log").read_text().splitlines()[1] == "x" * 1024


def test_the_daemons_own_log_is_written_line_by_line(tmp_path: Path) -> None:
    writer = LogWriter(ROOMY)
    stream = LogStream(tmp_path / "daemon.log", writer)
    stream.write("one\ntw")
    stream.write("o\nthr")
    writer.close(60)
    assert (tmp_path / "daemon.log").read_text() == "one\ntwo\n"
