"""Server-sent events as OpenAI clients read them.

The headers leave before the first token is computed; a wall-clock timer sends `: ping` comments, so that a long
prefill or a stuck step is never silent; a reader that stops reading is cut off instead of buffered for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp_sse import EventSourceResponse

from daemon.worker.api.body import encode


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds between pings, and how long one write may wait for the reader."""

    ping_s: float = 5.0
    send_timeout_s: float = 30.0


class Events:
    """One open stream."""

    def __init__(self, response: EventSourceResponse) -> None:
        self.response: web.StreamResponse = response
        self._sse = response

    async def send(self, document: Mapping[str, object]) -> None:
        """Send one event.

        Raises:
            ConnectionError: the reader is gone, or has stopped reading.
        """
        await self._send(encode(document))

    async def done(self) -> None:
        """Send the end mark of a stream that is complete."""
        await self._send("[DONE]")

    async def _send(self, data: str) -> None:
        try:
            await self._sse.send(data)
        except TimeoutError:
            raise ConnectionResetError("the client has stopped reading") from None


@asynccontextmanager
async def event_stream(request: web.Request, times: StreamTimes) -> AsyncIterator[Events]:
    """Open a stream as the answer to *request*."""
    response = EventSourceResponse(
        sep="\n",
        allow_all_methods=True,
        ping_interval=times.ping_s,
        send_timeout=times.send_timeout_s,
    )
    response.headers["Content-Type"] = "text/event-stream; charset=utf-8"
    await response.prepare(request)
    async with response:
        yield Events(response)
