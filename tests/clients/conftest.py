"""A worker for real clients: served on a loopback socket by a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from daemon.config.wire import Drain, Ready
from tests.worker.child_process import REAL, Child, child
from tests.worker.fake_engine import Script
from tests.worker.live_app import live_app
from tests.worker.specs import worker_spec


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


@contextmanager
def serve_real(folder: Path) -> Iterator[LiveWorker]:
    """Run a worker process on the demo model, as the supervisor does."""
    spec = worker_spec(api_key="test-key", max_concurrent=4)
    with child(spec.model_copy(update={"model_path": str(folder)}), REAL) as worker:
        worker.until(Ready)
        channel = threading.Thread(target=drained, args=(worker,))
        channel.start()
        yield LiveWorker(f"http://127.0.0.1:{worker.port}", "chat", "small", "test-key")
        worker.send(Drain(timeout_s=1))
        channel.join()


def drained(worker: Child) -> None:
    """Read the worker's snapshots until it ends, as the supervisor does."""
    while worker.receive() is not None:
        pass


@pytest.fixture(
    scope="session",
    params=["fake", pytest.param("real", marks=[pytest.mark.model, pytest.mark.e2e])],
)
def live_worker(request: pytest.FixtureRequest) -> Iterator[LiveWorker]:
    """A worker that has loaded its model: a fake one with scripted tokens, and the demo model's."""
    if request.param == "fake":
        with serve_fake(Script(step_s=0.001)) as worker:
            yield worker
    else:
        with serve_real(request.getfixturevalue("demo_model_path")) as worker:
            yield worker


@pytest.fixture
def small_worker() -> Iterator[LiveWorker]:
    """A worker with one place and no queue."""
    with serve_fake(Script(step_s=0.001), max_concurrent=1, queue=0) as worker:
        yield worker
