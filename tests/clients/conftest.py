"""A worker for real clients: served on a loopback socket by a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.worker.fake_engine import Script
from tests.worker.live_app import live_app


@dataclass(frozen=True)
class LiveWorker:
    """Where a worker is and what a client needs to know of it."""

    url: str
    model: str
    alias: str
    api_key: str

    @property
    def base_url(self) -> str:
        """What a client of OpenAI's API is given."""
        return f"{self.url}/v1"


@contextmanager
def serve_fake(script: Script, **server: Any) -> Iterator[LiveWorker]:
    """Serve the fake engine from another thread, as clients block this one."""
    ready = threading.Event()
    found: list[LiveWorker] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with live_app(script, api_key="test-key", **server) as app:
            found.append(LiveWorker(app.url, "chat", "small", "test-key"))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="session")
def live_worker() -> Iterator[LiveWorker]:
    """A worker that has loaded its model."""
    with serve_fake(Script(step_s=0.001)) as worker:
        yield worker


@pytest.fixture
def small_worker() -> Iterator[LiveWorker]:
    """A worker with one place and no queue."""
    with serve_fake(Script(step_s=0.001), max_concurrent=1, queue=0) as worker:
        yield worker
