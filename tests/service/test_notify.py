from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.service.notify import Notifier

PID = 42


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.setblocking(False)
        yield channel


def heard(systemd: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(systemd.recv(4096).decode())
        except BlockingIOError:
            return messages


def notifier(systemd: socket.socket, clock: Clock | None = None, **environ: str) -> Notifier:
    address = {"NOTIFY_SOCKET": systemd.getsockname()}
    return Notifier(address | environ, pid=PID, clock=clock or Clock())


def test_each_word_is_one_datagram(systemd: socket.socket) -> None:
    speaker = notifier(systemd)
    speaker.ready()
    speaker.reloading()
    speaker.extend(30)
    assert heard(systemd) == [
        "READY=1",
        "RELOADING=1\nMONOTONIC_USEC=100000000",
        "EXTEND_TIMEOUT_USEC=30000000",
    ]


def test_stopping_is_said_once_and_nothing_is_ready_after_it(systemd: socket.socket) -> None:
    speaker = notifier(systemd)
    speaker.stopping()
    speaker.stopping()
    speaker.ready()
    assert heard(systemd) == ["STOPPING=1"]


def test_a_status_is_said_when_it_changes(systemd: socket.socket) -> None:
    speaker = notifier(systemd)
    for text in ("1 of 2", "1 of 2", "2 of 2"):
        speaker.status(text)
    assert heard(systemd) == ["STATUS=1 of 2", "STATUS=2 of 2"]


def test_the_watchdog_is_fed_at_half_its_time_and_only_by_progress(systemd: socket.socket) -> None:
    clock = Clock()
    speaker = notifier(systemd, clock, WATCHDOG_USEC="60000000", WATCHDOG_PID=str(PID))
    speaker.turned()
    clock.now += 29
    speaker.turned()
    assert heard(systemd) == ["WATCHDOG=1"]
    clock.now += 1
    speaker.turned()
    assert heard(systemd) == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "7"}]
)
def test_a_watchdog_that_does_not_watch_us_is_not_fed(
    systemd: socket.socket, environ: dict[str, str]
) -> None:
    notifier(systemd, **environ).turned()
    assert heard(systemd) == []


def test_outside_of_systemd_nothing_is_said_and_nothing_fails(tmp_path: Path) -> None:
    for value in ("", "relative", str(tmp_path / "nobody")):
        Notifier({"NOTIFY_SOCKET": value}, pid=PID).ready()


def test_an_abstract_socket_is_found() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        try:
            channel.bind("\0tqd-test-notify")
        except OSError:
            pytest.skip("this system has no abstract sockets")
        Notifier({"NOTIFY_SOCKET": "@tqd-test-notify"}, pid=PID).ready()
        assert channel.recv(100) == b"READY=1"
