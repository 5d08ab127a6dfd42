from __future__ import annotations

import threading
from pathlib import Path

from daemon.supervisor.logs import LogStream, LogWriter, Rotation, Tail

ROOMY = Rotation(max_size=10**6, backups=2)


def written(path: Path, *chunks: bytes, rotation: Rotation = ROOMY) -> None:
    writer = LogWriter(rotation)
    for chunk in chunks:
        writer.write(path, chunk)
    writer.close()


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
    assert sorted(it.name for it in tmp_path.iterdir()) == ["chat.log", "chat.log.1", "chat.log.2"]
    kept = b"".join(
        (tmp_path / name).read_bytes() for name in ("chat.log.2", "chat.log.1", "chat.log")
    )
    assert kept == b"".join(lines[4:])


def test_no_backups_means_that_the_file_starts_anew(tmp_path: Path) -> None:
    written(tmp_path / "a.log", b"1" * 15, b"2" * 15, rotation=Rotation(max_size=20, backups=0))
    assert [it.read_bytes() for it in tmp_path.iterdir()] == [b"2" * 15]


def test_a_log_that_somebody_moved_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    writer = LogWriter(ROOMY)
    writer.write(path, b"1\n")
    while not path.exists():
        pass
    path.rename(tmp_path / "moved")
    writer.write(path, b"2\n")
    writer.close()
    assert path.read_bytes() == b"2\n"


def test_output_that_cannot_be_written_is_counted_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = LogWriter(ROOMY)
    writer.write(tmp_path / "file" / "a.log", b"lost")
    writer.write(tmp_path / "b.log", b"kept")
    writer.close()
    assert writer.dropped_bytes(tmp_path / "file" / "a.log") == 4
    assert (tmp_path / "b.log").read_bytes() == b"kept"


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
    writer.close()
    assert len((tmp_path / "a.log").read_bytes()) == 1024


def test_the_daemons_own_log_is_written_line_by_line(tmp_path: Path) -> None:
    stream = LogStream(tmp_path / "daemon.log", ROOMY)
    stream.write("one\ntw")
    assert (tmp_path / "daemon.log").read_text() == "one\n"
    stream.write("o\n")
    assert (tmp_path / "daemon.log").read_text() == "one\ntwo\n"
