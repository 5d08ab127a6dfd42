"""A real worker process and the supervisor's end of its channel."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from daemon.config.wire import Message, Ready, WorkerSpec, encode, from_worker

ROOT = Path(__file__).parents[2]
FAKE = ("-m", "tests.worker.fake_worker")
REAL = ("-m", "daemon.worker")
PATIENCE_S = 60.0  # only a hang takes that long

MessageT = TypeVar("MessageT", bound=Message)


class Child:
    """The parent's side of one worker process."""

    def __init__(self, program: Sequence[str]) -> None:
        self._open = ExitStack()
        ours, theirs = socket.socketpair()
        listener = socket.create_server(("127.0.0.1", 0))
        with theirs, listener:
            self.port = listener.getsockname()[1]
            fds = (theirs.fileno(), listener.fileno())
            options = ("--channel-fd", str(fds[0]), "--listen-fd", str(fds[1]))
            self.process = subprocess.Popen(
                [sys.executable, *program, *options],
                pass_fds=fds,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        ours.settimeout(PATIENCE_S)
        self.channel = ours
        self._lines: IO[bytes] = ours.makefile("rb")

    def send(self, message: Message) -> None:
        self.channel.sendall(encode(message))

    def receive(self) -> Message | None:
        """Return the next message; None: the worker has closed its end."""
        line = self._lines.readline()
        return from_worker.validate_json(line) if line else None

    def until(self, kind: type[MessageT]) -> tuple[MessageT, list[Message]]:
        """Return the first message of *kind* and what came before it."""
        before: list[Message] = []
        while (message := self.receive()) is not None:
            if isinstance(message, kind):
                return message, before
            before.append(message)
        raise AssertionError(f"no {kind.__name__}: {before}\n{self.stderr()}")

    def lose_lease(self) -> None:
        """Close the channel, as a supervisor does that dies."""
        self._lines.close()
        self.channel.close()

    def end(self) -> None:
        """Make sure that nothing is left of the worker."""
        self.lose_lease()
        self._open.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def http(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Send a request and return the response, its body unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        self._open.callback(connection.close)
        connection.request(method, path, None if body is None else json.dumps(body))
        return self._open.enter_context(connection.getresponse())


@contextmanager
def child(spec: WorkerSpec | bytes | None, program: Sequence[str] = FAKE) -> Iterator[Child]:
    """Run a worker with *spec*; whatever happens, it is gone afterwards."""
    worker = Child(program)
    try:
        if isinstance(spec, bytes):
            worker.channel.sendall(spec)
        elif spec is not None:
            worker.send(spec)
        yield worker
    finally:
        worker.end()


@contextmanager
def ready_child(spec: WorkerSpec) -> Iterator[Child]:
    """Run a worker with *spec* that has loaded."""
    with child(spec) as worker:
        worker.until(Ready)
        yield worker
