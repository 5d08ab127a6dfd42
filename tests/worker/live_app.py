"""The application over a real loopback socket, with the fake engine behind it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from daemon.worker.api.sse import StreamTimes
from daemon.worker.app import build_app
from daemon.worker.serving import Serving
from tests.worker.fake_engine import FakeEngine, Script, fake_loaded
from tests.worker.specs import worker_spec

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Say hi"}]


@dataclass
class Answer:
    """One HTTP answer, read to its end."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def frames(self) -> list[str]:
        """The frames of a stream, comments included."""
        *frames, rest = self.body.decode().split("\n\n")
        assert rest == ""
        return frames

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON documents of a stream, the end mark left out."""
        data = [frame.removeprefix("data: ") for frame in self.frames if frame[0] != ":"]
        return [json.loads(item) for item in data if item != "[DONE]"]

    @property
    def text(self) -> str:
        """The text of the first choice, from a document or from a stream."""
        if self.headers["Content-Type"].startswith("application/json"):
            choice = self.json["choices"][0]
            return choice["message"]["content"] if "message" in choice else choice["text"]
        choices = [c for event in self.events for c in event["choices"] if c["index"] == 0]
        parts = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices]
        return "".join(parts)

    @property
    def finishes(self) -> list[str]:
        """Every finish reason that is not null."""
        events = self.events if self.body.startswith((b"data", b":")) else [self.json]
        reasons = [c["finish_reason"] for event in events for c in event.get("choices", [])]
        return [reason for reason in reasons if reason is not None]


@dataclass
class LiveApp:
    """A running application and a client of it."""

    serving: Serving
    engine: FakeEngine
    session: aiohttp.ClientSession
    url: str

    async def get(self, path: str, **kwargs: Any) -> Answer:
        return await self.request("GET", path, **kwargs)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> Answer:
        if body is not None:
            kwargs["json"] = body
        return await self.request("POST", path, **kwargs)

    async def chat(self, **fields: Any) -> Answer:
        return await self.post(CHAT, {"messages": HELLO} | fields)

    async def complete(self, **fields: Any) -> Answer:
        return await self.post(TEXT, {"prompt": "The capital"} | fields)

    async def request(self, method: str, path: str, **kwargs: Any) -> Answer:
        async with self.session.request(method, self.url + path, **kwargs) as response:
            return Answer(response.status, response.headers, await response.read())


async def until(condition: Callable[[], object]) -> None:
    """Wait for *condition*; a test that waits for ever ends by the time limit of the suite."""
    while not condition():  # noqa: ASYNC110 - the state of the application has no event to wait for
        await asyncio.sleep(0.002)


@asynccontextmanager
async def live_app(
    script: Script | None = None,
    *,
    loaded: bool = True,
    times: StreamTimes | None = None,
    api_key: str | None = None,
    send_buffer: int | None = None,
    **server: Any,
) -> AsyncIterator[LiveApp]:
    """Run the application of a worker with the fake engine; *send_buffer* bounds what the kernel holds for a reader."""
    spec = worker_spec(api_key=api_key, **server)
    serving = Serving(spec)
    engine = FakeEngine(script or Script())
    if loaded:
        serving.load(fake_loaded(spec, engine))
    runner = web.AppRunner(
        build_app(serving, times), handler_cancellation=True, access_log=None, shutdown_timeout=1
    )
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:  # connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    await web.SockSite(runner, listener).start()
    async with aiohttp.ClientSession() as session:
        yield LiveApp(serving, engine, session, f"http://127.0.0.1:{port}")
    await runner.cleanup()
    serving.close()
