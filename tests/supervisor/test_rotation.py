from __future__ import annotations

import gzip
import threading
from pathlib import Path

import pytest

from daemon.supervisor import rotation
from daemon.supervisor.rotation import Compressor, Rotated, rotate, rotated


def rotated_once(log: Path, content: bytes, backups: int = 3) -> Rotated:
    log.write_bytes(content)
    rotate(log, backups)
    return rotated(log)[-1]


def compress(log: Path) -> None:
    compressor = Compressor()
    compressor.tidy(log)
    compressor.close(10)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_numbers_grow_and_the_oldest_files_go_in_whichever_form(tmp_path: Path) -> None:
    log = tmp_path / "chat.log"
    for number in range(1, 6):
        rotated_once(log, b"%d" % number, backups=2)
        if number == 3:
            compress(log)
    assert [it.number for it in rotated(log)] == [4, 5]
    assert names(tmp_path) == ["chat.log.4", "chat.log.5"]


def test_fewer_backups_remove_what_is_too_much_at_the_next_rotation(tmp_path: Path) -> None:
    log = tmp_path / "chat.log"
    for _ in range(3):
        rotated_once(log, b"x")
    log.write_bytes(b"last")
    rotate(log, 0)
    assert names(tmp_path) == []


def test_a_compressed_log_is_private_whole_and_as_old_as_what_it_holds(tmp_path: Path) -> None:
    it = rotated_once(tmp_path / "chat.log", b"line\n" * 1000)
    written = it.plain.stat()
    compress(it.log)
    assert names(tmp_path) == ["chat.log.1.gz"]
    packed = it.compressed.stat()
    assert packed.st_mode & 0o777 == 0o600
    assert packed.st_mtime_ns == written.st_mtime_ns
    assert packed.st_size < 200
    with it.open() as file:
        assert file.read() == b"line\n" * 1000


def test_logs_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["chat.log.old", "chat.log.1.bak", "chat-2.log.1", "xchat.log.1", "chat.log.gz"]
    for name in others:
        (tmp_path / name).write_bytes(b"theirs")
    it = rotated_once(tmp_path / "chat.log", b"ours")
    compress(it.log)
    assert names(tmp_path) == sorted([*others, "chat.log.1.gz"])


def test_what_a_crash_left_behind_is_finished_by_the_next_round(tmp_path: Path) -> None:
    """Killed while it compressed file 1; killed between the last two steps of file 2."""
    log = tmp_path / "chat.log"
    first = rotated_once(log, b"first")
    (tmp_path / "chat.log.1.gz.part").write_bytes(b"half")
    second = rotated_once(log, b"second")
    second.compressed.write_bytes(gzip.compress(b"second"))
    assert rotated(log) == [first, second]

    compress(log)

    assert names(tmp_path) == ["chat.log.1.gz", "chat.log.2.gz"]
    assert [gzip.decompress(it.compressed.read_bytes()) for it in (first, second)] == [
        b"first",
        b"second",
    ]


def test_a_log_that_cannot_be_compressed_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = rotated_once(tmp_path / "chat.log", b"kept")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rotation.shutil, "copyfileobj", full)
    compress(it.log)
    assert names(tmp_path) == ["chat.log.1"]


def test_a_file_that_is_removed_while_it_is_compressed_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "chat.log"
    it = rotated_once(log, b"gone soon")
    began, removed = threading.Event(), threading.Event()
    copy = rotation.shutil.copyfileobj

    def slowly(source: object, target: object) -> None:
        began.set()
        assert removed.wait(10)
        copy(source, target)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(rotation.shutil, "copyfileobj", slowly)
    compressor = Compressor()
    compressor.tidy(log)
    assert began.wait(10)
    it.remove()
    removed.set()
    rotated_once(log, b"next")
    compressor.tidy(log)
    compressor.close(10)
    assert [it.number for it in rotated(log)] == [1]  # numbers begin again where nothing is left
    with rotated(log)[0].open() as file:
        assert file.read() == b"next"
