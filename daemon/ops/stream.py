"""The event stream of the ops endpoint: one `EventLog`, any number of clients, bounded memory for each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from aiohttp import web
from aiohttp_sse import EventSourceResponse, sse_response

from daemon.ops.events import EventLog

MOST_CLIENTS = 256
PING_S = 15.0  # under the minute after which proxies give up on a silent stream
SEND_TIMEOUT_S = 10.0  # a client that reads nothing for this long is dropped
RETRY_MS = 2000


class EventStream:
    """Serves *log* as server-sent events; `Last-Event-ID` goes on where a client was cut off."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._clients = 0

    @property
    def full(self) -> bool:
        """Whether no more clients are taken."""
        return self._clients >= MOST_CLIENTS

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Send events until the client is gone, is too slow, or the daemon ends."""
        with self._counted():
            async with sse_response(
                request, ping_interval=PING_S, send_timeout=SEND_TIMEOUT_S
            ) as response:
                await response.write(f"retry: {RETRY_MS}\n\n".encode())
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await self._follow(response, response.last_event_id)
        return response

    async def _follow(self, response: EventSourceResponse, last_id: str | None) -> None:
        log = self._log
        seq = log.seq if last_id is None else log.seq_of(last_id)
        batch = log.after(seq)
        if batch.missed:
            first = batch.events[0]["seq"] - 1 if batch.events else log.seq
            await response.send("{}", id=log.id_of(first), event="events.missed")
        while not log.closed:
            for event in batch.events:
                data = json.dumps({"at": event["at"], **event["data"]}, ensure_ascii=False)
                await response.send(data, id=event["id"], event=event["event"])
                seq = event["seq"]
            seq = log.seq if seq is None else seq
            await log.wait(seq)
            batch = log.after(seq)
            if batch.missed:
                return  # too slow for the ring: it may come back and go on from what is kept

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._clients += 1
        try:
            yield
        finally:
            self._clients -= 1
