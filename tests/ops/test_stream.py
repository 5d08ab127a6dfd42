"""The event stream over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from daemon.ops import stream
from daemon.ops.events import EventLog
from daemon.ops.stream import EventStream

Client = TestClient[web.Request, web.Application]


def visit(log: EventLog, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async def session() -> None:
        app = web.Application()
        app.add_routes([web.get("/", EventStream(log).serve)])
        server = TestServer(app)
        async with asyncio.timeout(60), TestClient(server) as client:
            await work(client)

    asyncio.run(session())


@asynccontextmanager
async def following(client: Client, last_id: str | None = None) -> AsyncIterator[ClientResponse]:
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    async with client.get("/", headers=headers) as response:
        assert await response.content.readuntil(b"\n\n") == b"retry: 2000\n\n"
        yield response


async def receive(response: ClientResponse) -> tuple[str, str, dict[str, Any]]:
    """Return the id, the name and the data of the next event."""
    block = (await response.content.readuntil(b"\r\n\r\n")).decode().strip()
    fields = dict(line.split(": ", 1) for line in block.splitlines())
    return fields["id"], fields["event"], json.loads(fields["data"])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what a socket does sets no event
        await asyncio.sleep(0.01)


def added(log: EventLog, *names: str) -> None:
    for name in names:
        log.publish("server.added", "now", {"server": name})


def test_clients_get_what_happens_after_they_came() -> None:
    log = EventLog(boot="0badcafe")
    added(log, "old")

    async def work(client: Client) -> None:
        async with following(client) as one, following(client) as other:
            await until(lambda: log.waiting == 2)
            added(log, "naïve\r\nid: 9")
            for response in (one, other):
                event = ("0badcafe-2", "server.added", {"at": "now", "server": "naïve\r\nid: 9"})
                assert await receive(response) == event

    visit(log, work)


def test_a_client_that_was_cut_off_loses_nothing() -> None:
    log = EventLog(boot="0badcafe")
    added(log, "a", "b", "c")

    async def work(client: Client) -> None:
        async with following(client, "0badcafe-1") as response:
            assert [(await receive(response))[0] for _ in range(2)] == ["0badcafe-2", "0badcafe-3"]

    visit(log, work)


@pytest.mark.parametrize("last_id", ["0badcafe-1", "deadbeef-4", "what"])
def test_a_client_that_missed_something_is_told_and_gets_the_rest(last_id: str) -> None:
    log = EventLog(capacity=2, boot="0badcafe")
    added(log, "a", "b", "c", "d")

    async def work(client: Client) -> None:
        async with following(client, last_id) as response:
            assert (await receive(response))[:2] == ("0badcafe-2", "events.missed")
            assert (await receive(response))[0] == "0badcafe-3"
            assert (await receive(response))[0] == "0badcafe-4"
            await until(lambda: log.waiting == 1)
            added(log, "e")
            assert (await receive(response))[0] == "0badcafe-5"

    visit(log, work)


def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring goes on without it, and its connection ends: nothing is kept for it."""
    monkeypatch.setattr(stream, "SEND_TIMEOUT_S", 0.2)
    log = EventLog(capacity=50, boot="0badcafe")
    big = {"server": "x" * 200_000}

    async def work(client: Client) -> None:
        async with following(client):
            await until(lambda: log.waiting == 1)
            for _ in range(50):  # 10 MB, more than the sockets hold
                log.publish("server.added", "now", big)
            await asyncio.sleep(0)
            assert log.waiting == 0
            await until(lambda: not client.server.handler.connections)  # type: ignore[union-attr]

    visit(log, work)


def test_a_client_that_goes_away_is_forgotten_at_once() -> None:
    log = EventLog()

    async def work(client: Client) -> None:
        async with following(client) as response:
            await until(lambda: log.waiting == 1)
            response.close()
            await until(lambda: log.waiting == 0)

    visit(log, work)


def test_the_stream_ends_with_the_daemon() -> None:
    log = EventLog()

    async def work(client: Client) -> None:
        async with following(client) as response:
            await until(lambda: log.waiting == 1)
            log.close()
            assert await response.content.read() == b""

    visit(log, work)


def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PING_S", 0.01)

    async def work(client: Client) -> None:
        async with following(client) as response:
            assert (await response.content.readuntil(b"\r\n\r\n")).startswith(b":")

    visit(EventLog(), work)
