"""Channels that wait for a round, on real sockets and an event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import cast

import pytest

from daemon.supervisor import rounds
from daemon.supervisor.rounds import Rounds

NEVER_S = 3600.0


class Line:
    """A channel: *ours* is read by the event loop, *theirs* is the worker's end."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    async def open(self) -> Line:
        self.reader, self.writer = await asyncio.open_connection(sock=self.ours)
        self.transport = cast("asyncio.Transport", self.writer.transport)
        return self

    @property
    def heard(self) -> bytes:
        return bytes(self.reader._buffer)  # type: ignore[attr-defined]  # reading would wait

    async def close(self) -> None:
        self.writer.close()
        self.theirs.close()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_is_put_off_is_heard_at_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        monkeypatch.setattr(rounds, "EVERY_S", NEVER_S)
        waiting = Rounds()
        silent, talker, urgent = lines = [await Line().open() for _ in range(3)]
        for line in (silent, talker):
            waiting.put_off(line.ours, line.transport)
        for line in (talker, urgent):
            line.theirs.sendall(b"news")
        await settle()
        assert [it.heard for it in lines] == [b"", b"", b"news"]

        waiting._go()
        await settle()
        assert [it.heard for it in lines] == [b"", b"news", b"news"]

        silent.theirs.sendall(b"late")
        await settle()
        assert silent.heard == b""
        waiting.leave(silent.ours)
        await settle()
        assert silent.heard == b"late"
        for line in lines:
            await line.close()

    asyncio.run(session())


def test_rounds_come_by_themselves_and_the_end_of_a_channel_is_heard_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def session() -> bytes:
        monkeypatch.setattr(rounds, "EVERY_S", 0.001)
        waiting, line = Rounds(), await Line().open()
        waiting.put_off(line.ours, line.transport)
        line.theirs.sendall(b"bye")
        line.theirs.close()
        async with asyncio.timeout(30):
            said = await line.reader.read()
        waiting.leave(line.ours)
        await line.close()
        return said

    assert asyncio.run(session()) == b"bye"


def test_a_channel_that_broke_leaves_its_number_to_another_one() -> None:
    async def session() -> None:
        waiting, line, broken = Rounds(), Line(), await Line().open()
        waiting.put_off(broken.ours, broken.transport)
        number = broken.ours.fileno()
        broken.transport.abort()
        waiting.put_off(broken.ours, broken.transport)
        await settle()

        os.dup2(line.ours.fileno(), number)
        line.ours.close()
        line.ours = socket.socket(fileno=number)
        await line.open()
        waiting.put_off(line.ours, line.transport)
        line.theirs.sendall(b"news")
        waiting._go()
        await settle()
        assert line.heard == b"news"
        waiting.leave(line.ours)
        waiting.leave(broken.ours)
        await broken.close()
        await line.close()

    asyncio.run(session())
