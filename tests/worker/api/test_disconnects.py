"""Clients that leave: their sequences end, nothing is left behind, the others go on."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.fake_engine import Script
from tests.worker.live_app import CHAT, HELLO, TEXT, LiveApp, live_app, until

ENDLESS = {"messages": HELLO, "ignore_eos": True, "stream": True}


async def reset_after(app: LiveApp, lines: int, path: str, body: dict[str, Any]) -> None:
    """Send a request, read *lines* lines of the answer, and reset the connection."""
    host, port = app.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    for _ in range(lines):
        await reader.readline()
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def test_fifty_streams_reset_at_random_places_leave_a_server_that_serves() -> None:
    """B16."""
    rng = random.Random(16)
    async with live_app(Script(step_s=0.001)) as app:
        await asyncio.gather(
            *(reset_after(app, rng.randint(1, 40), CHAT, ENDLESS) for _ in range(50))
        )
        await until(lambda: not app.engine.open)
        assert (await app.chat()).status == 200
        assert app.serving.counters.cancelled == 50


@pytest.mark.parametrize("lines", [0, 12])
@pytest.mark.parametrize("extra", [{}, {"stream": False}, {"n": 3}])
async def test_places_come_back_from_waiting_reading_and_running_requests(
    lines: int, extra: dict[str, Any]
) -> None:
    """B17: forty aborted requests over two places; the KV is back where it was."""
    body = ENDLESS | extra
    async with live_app(Script(step_s=0.001), max_concurrent=2, queue=200) as app:
        read = 0 if extra.get("stream") is False else lines
        await asyncio.gather(*(reset_after(app, read, CHAT, body) for _ in range(40)))
        await until(lambda: app.serving.counters.cancelled + app.serving.counters.rejected >= 40)
        await until(lambda: not app.engine.open)
        stats = (await app.get("/v1/cache/stats")).json["kv"]
        assert (stats["bytes"], stats["tokens"]) == (0, 0)
        assert (await app.chat()).status == 200


async def test_a_client_that_does_not_stream_can_leave_too() -> None:
    async with live_app(Script(queued_s=60)) as app:
        request = asyncio.ensure_future(app.chat())
        await until(lambda: app.engine.running)
        request.cancel()
        await until(lambda: not app.engine.open)
        assert app.engine.aborted == 1
        assert app.serving.counters.cancelled == 1


async def test_the_neighbours_of_a_client_that_leaves_go_on() -> None:
    async with live_app(Script(step_s=0.005)) as app:
        neighbour = asyncio.ensure_future(app.chat(stream=True))
        await reset_after(app, 12, CHAT, ENDLESS)
        assert (await neighbour).text == "The capital of France is Paris."


@settings(max_examples=60, deadline=None)
@given(
    passes=st.integers(0, 60),
    path=st.sampled_from([CHAT, TEXT]),
    stream=st.booleans(),
    n=st.integers(1, 3),
)
def test_a_request_cancelled_at_any_point_leaves_nothing(
    passes: int, path: str, stream: bool, n: int
) -> None:
    """B18: the client goes after any number of passes of the event loop."""

    async def scenario() -> None:
        body = {"messages": HELLO} if path == CHAT else {"prompt": ["The", "of"]}
        async with live_app() as app:
            request = asyncio.ensure_future(
                app.post(path, body | {"stream": stream, "n": n, "ignore_eos": True})
            )
            for _ in range(passes):
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await until(lambda: not app.engine.open)
            await app.serving.wait_idle()

    asyncio.run(scenario())
