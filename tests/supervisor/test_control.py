"""The control socket from both ends."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from daemon.errors import (
    ConfigError,
    DaemonUnreachableError,
    Problem,
    TqdError,
    UnknownServerError,
)
from daemon.ops.events import EventPage
from daemon.ops.written import Written
from daemon.paths import StateDir
from daemon.supervisor.client import Client
from daemon.supervisor.control import ControlSocket
from daemon.supervisor.messages import Action, Change, Verdict

PROBLEM = Problem("/etc/servers.yaml", 14, 5, "servers.a.port", "port 1 is in use", "write another")


class FakeDaemon:
    """Answers what a test wants to hear, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.failure: Exception | None = None

    def status(self) -> Written:
        return Written(b'{"schema": 1}', etag="")

    async def act(self, action: Action, names: Sequence[str] | None) -> Mapping[str, int]:
        self._ask((action, names))
        return {"a": 3}

    async def reload(self) -> Verdict:
        self._ask("reload")
        return {"result": "applied", "steps": [], "warnings": []}

    async def diff(self) -> Sequence[Change]:
        self._ask("diff")
        return [{"action": "stop", "server": "a", "changes": [], "text": "stop a"}]

    async def events(self, after: str | None, wait_s: float) -> EventPage:
        self._ask(("events", after, wait_s))
        return {"last": "b-1", "missed": False, "events": []}

    def shut_down(self) -> None:
        self._ask("shutdown")

    def _ask(self, what: object) -> None:
        self.asked.append(what)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


@pytest.fixture
def fake(state: StateDir) -> Iterator[FakeDaemon]:
    """A daemon that listens, in a thread, until the test is over."""
    daemon = FakeDaemon()
    done, up = threading.Event(), threading.Event()

    async def serve() -> None:
        control = ControlSocket(state.socket, daemon)
        control.bind()
        await control.serve()
        up.set()
        await asyncio.to_thread(done.wait)
        await control.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert up.wait(60)
        yield daemon
    finally:
        done.set()
        thread.join()
    assert not state.socket.exists()


def test_questions_and_commands_arrive_as_they_were_meant(
    state: StateDir, fake: FakeDaemon
) -> None:
    client = Client(state)
    assert client.running()
    assert client.status() == {"schema": 1}
    assert client.act("restart", ["a"]) == {"a": 3}
    assert client.act("stop", None) == {"a": 3}
    assert client.reload()["result"] == "applied"
    assert client.diff()[0]["text"] == "stop a"
    client.shut_down()
    assert fake.asked == [("restart", ["a"]), ("stop", None), "reload", "diff", "shutdown"]


def test_events_are_asked_for_from_a_place_on(state: StateDir, fake: FakeDaemon) -> None:
    client = Client(state)
    assert client.events(None)["last"] == "b-1"
    client.events("b-1", 2.5)
    assert fake.asked == [("events", None, 0.0), ("events", "b-1", 2.5)]


def test_a_refusal_comes_back_as_what_it_was(state: StateDir, fake: FakeDaemon) -> None:
    client = Client(state)
    fake.failure = UnknownServerError('no server is called "x"', hint="one of a, b")
    with pytest.raises(UnknownServerError, match="no server is called") as unknown:
        client.act("start", ["x"])
    assert (unknown.value.hint, unknown.value.exit_code) == ("one of a, b", 4)

    fake.failure = ConfigError([PROBLEM])
    with pytest.raises(ConfigError) as refused:
        client.reload()
    assert refused.value.problems == (PROBLEM,)

    fake.failure = OSError(28, "No space left on device")
    with pytest.raises(TqdError, match="No space left"):
        client.act("stop", ["a"])


def test_a_body_that_names_no_servers_is_refused(state: StateDir, fake: FakeDaemon) -> None:
    for body in (b"", b"{", b"[]", b'{"servers": [1]}', b'{"servers": "a"}'):
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(str(state.socket))
            head = f"POST /stop HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            channel.sendall(head.encode() + body)
            response = http.client.HTTPResponse(channel)
            response.begin()
            assert (response.status, b"the body must be" in response.read()) == (409, True)
    assert fake.asked == []


def test_the_socket_is_for_this_user_alone(state: StateDir, fake: FakeDaemon) -> None:
    assert oct(state.socket.stat().st_mode & 0o777) == "0o600"


def test_without_a_daemon_the_client_says_how_to_get_one(state: StateDir) -> None:
    with pytest.raises(DaemonUnreachableError, match="no daemon answers") as nobody:
        Client(state).status()
    assert nobody.value.hint == "`tqd start` starts the daemon"


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def bind_and_close(path: Path) -> None:
    async def work() -> None:
        control = ControlSocket(path, FakeDaemon())
        control.bind()
        await control.close()

    asyncio.run(work())


def test_a_socket_that_nobody_answers_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tqd.sock"
    listening(path).close()
    assert path.is_socket()
    bind_and_close(path)


def test_the_socket_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tqd.sock"
    with listening(path), pytest.raises(TqdError, match="another program listens"):
        bind_and_close(path)
    assert path.is_socket()


def test_a_file_in_the_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tqd.sock"
    path.write_text("mine")
    with pytest.raises(TqdError, match="cannot listen on"):
        bind_and_close(path)
    assert path.read_text() == "mine"


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(TqdError, match="others may write there"):
        bind_and_close(tmp_path / "tqd.sock")


def test_a_long_path_moves_the_socket_to_a_short_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    state = StateDir(tmp_path / ("long" * 30))
    assert len(str(state.socket)) < 100 or len(str(tmp_path)) > 50
    bind_and_close(state.socket)
    assert oct(state.socket.parent.stat().st_mode & 0o777) == "0o700"
