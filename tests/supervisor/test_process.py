"""Real children: what they say, what they write, how they end, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from daemon.config import wire
from daemon.config.spec import ServerSpec
from daemon.policy.spec import KvRequest
from daemon.supervisor.process import Child, Message
from daemon.supervisor.rounds import Rounds

KV = KvRequest(
    policy="balanced", k="int8", v="turbo4", explicit=False, boundary_v=0, boundary_mode="int8",
    boundary_k="auto", sink_tokens=4, tail_tokens=32, strict=False,
)  # fmt: skip
SPEC = wire.WorkerSpec(
    name="chat", launch=3, nonce="n", spec_hash="h", model_path="/m",
    server=ServerSpec(model="m", port=1), kv=KV,
)  # fmt: skip

OPEN_CHANNEL = """
import argparse, json, os, signal, socket, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--channel-fd", type=int)
parser.add_argument("--listen-fd", type=int)
fds = parser.parse_args()
channel = socket.socket(fileno=fds.channel_fd)
lines = channel.makefile("rb")
say = lambda **message: channel.sendall(json.dumps(message).encode() + b"\\n")
spec = json.loads(lines.readline())
"""


class Witness:
    """Keeps all that a child did; *then* is called on its first message."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.messages: list[Message] = []
        self.problems: list[str] = []
        self.written = b""
        self._then = then

    def message(self, message: Message) -> None:
        self.messages.append(message)
        if len(self.messages) == 1:
            self._then()

    def garbled(self, problem: str) -> None:
        self.problems.append(problem)

    def output(self, data: bytes) -> None:
        self.written += data


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def attend(
    program: str, listener: socket.socket, then: Callable[[Child], None] = lambda child: None
) -> tuple[int, Witness]:
    """Run *program* as a worker to its end."""

    async def run() -> tuple[int, Witness]:
        command = [sys.executable, "-c", OPEN_CHANNEL + program]
        child = Child.spawn(command, {}, SPEC, listener)
        witness = Witness(lambda: then(child))
        async with asyncio.timeout(30):
            return await child.attend(witness, Rounds()), witness

    return asyncio.run(run())


def test_a_child_gets_its_spec_and_its_words_and_output_arrive(listener: socket.socket) -> None:
    code, witness = attend(
        """
say(type="hello", protocol=1, nonce=spec["nonce"], pid=os.getpid())
print("out"); sys.stdout.flush()
print("err", file=sys.stderr)
sys.exit(3)
""",
        listener,
    )
    assert code == 3
    assert witness.messages[0].model_dump()["nonce"] == "n"
    assert sorted(witness.written.split()) == [b"err", b"out"]


def test_a_child_serves_on_the_socket_that_was_bound_for_it(listener: socket.socket) -> None:
    code, _ = attend(
        """
server = socket.socket(fileno=fds.listen_fd)
client = socket.create_connection(server.getsockname())
sys.exit(0 if server.accept() else 1)
""",
        listener,
    )
    assert code == 0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('b"not json\\n"', "1 problems in a message"),
        ('b\'{"type": "poem"}\\n\'', "1 problems in a message"),
        ('b"x" * (5 * 2**20) + b"\\n"', "a message of more than 4194304 bytes"),
    ],
)
def test_what_is_no_message_is_reported(listener: socket.socket, line: str, problem: str) -> None:
    _, witness = attend(f"channel.sendall({line})", listener)
    assert witness.problems == [problem]


def test_words_sent_before_the_child_listens_arrive_in_order(listener: socket.socket) -> None:
    async def run() -> int:
        command = [
            *(sys.executable, "-c"),
            OPEN_CHANNEL + "kinds = [json.loads(lines.readline())['timeout_s'] for _ in 'abc']\n"
            "sys.exit(0 if kinds == [1.0, 2.0, 3.0] else 1)",
        ]
        child = Child.spawn(command, {}, SPEC, listener)
        for timeout_s in (1.0, 2.0, 3.0):
            child.send(wire.Drain(timeout_s=timeout_s))
        async with asyncio.timeout(30):
            return await child.attend(Witness(), Rounds())

    assert asyncio.run(run()) == 0


HELLO = 'say(type="hello", protocol=1, nonce="n", pid=os.getpid())\n'


def test_a_signal_is_a_negative_code(listener: socket.socket) -> None:
    code, _ = attend(HELLO + "time.sleep(60)", listener, Child.terminate)
    assert code == -signal.SIGTERM


def test_kill_ends_a_child_that_ignores_sigterm(listener: socket.socket) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HELLO + "time.sleep(60)"
    code, _ = attend(program, listener, Child.kill)
    assert code == -signal.SIGKILL


def test_what_a_child_leaves_in_its_group_ends_with_it(
    listener: socket.socket, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    code, _ = attend(
        f"""
orphan = subprocess.Popen(["sleep", "60"])
open({str(note)!r}, "w").write(str(orphan.pid))
sys.exit(0)
""",
        listener,
    )
    assert code == 0
    orphan = int(note.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(orphan).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)  # the kernel takes it down, init reaps it


def test_signals_after_the_end_reach_nobody(listener: socket.socket) -> None:
    async def run() -> None:
        child = Child.spawn([sys.executable, "-c", "pass"], {}, SPEC, listener)
        await child.attend(Witness(), Rounds())
        child.terminate()
        child.kill()
        child.send(wire.Drain(timeout_s=1.0))

    asyncio.run(run())


def test_a_sibling_does_not_hold_the_lease_of_another(listener: socket.socket) -> None:
    """A worker sees the end of its channel although a worker spawned later still runs."""

    async def run() -> tuple[int, int]:
        wait = OPEN_CHANNEL + HELLO + "sys.exit(7 if lines.readline() == b'' else 1)"
        first = Child.spawn([sys.executable, "-c", wait], {}, SPEC, listener)
        second = Child.spawn([sys.executable, "-c", wait], {}, SPEC, listener)
        witness = Witness(lambda: first._channel.shutdown(socket.SHUT_WR))
        async with asyncio.timeout(30):
            code = await first.attend(witness, Rounds())
        second.kill()
        return code, await second.attend(Witness(), Rounds())

    assert asyncio.run(run()) == (7, -signal.SIGKILL)


def test_a_missing_program_is_an_error_and_leaks_nothing(listener: socket.socket) -> None:
    gc.collect()  # what others have left open may not be closed meanwhile
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        Child.spawn(["/nowhere/python"], {}, SPEC, listener)
    assert psutil.Process().num_fds() == before


def test_a_spec_survives_the_channel() -> None:
    assert wire.to_worker.validate_python(json.loads(wire.encode(SPEC))) == SPEC
