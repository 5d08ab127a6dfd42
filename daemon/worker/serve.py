"""A worker on its event loop: serve HTTP, load, report, and end for one of a few reasons.

Every reason to end goes through `Worker.end`, which says how long open requests may still run. The shortest time
wins, and a failure is never hidden by a drain.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from daemon.config.wire import (
    Ack,
    Drain,
    Fatal,
    Live,
    Progress,
    Ready,
    RequestCounts,
    Snapshot,
    WorkerSpec,
)
from daemon.errors import PolicyError, WorkerExit, WorkerExitError
from daemon.log import get_logger
from daemon.worker.app import build_app
from daemon.worker.channel import Channel
from daemon.worker.serving import LoadedEngine, Phase, Serving

if TYPE_CHECKING:
    from daemon.worker.main import Loader

LEASE_DRAIN_S = 10.0  # without a supervisor: finish what is quick, then go
FAILURE_DRAIN_S = (
    5.0  # a dead engine has failed its streams already; they only need to be written out
)
INTERRUPT_S = 2.0  # for the error events of requests that ran out of time
CLOSE_S = 5.0  # for the engine's thread to end
STUCK_S = LEASE_DRAIN_S + INTERRUPT_S + CLOSE_S + 3.0  # no orderly end takes longer
SNAPSHOT_S = 1.0
HEARTBEAT_S = 5.0  # how seldom an idle worker says that nothing has changed but that it lives

ResultT = TypeVar("ResultT")


async def serve(spec: WorkerSpec, channel: Channel, listener: socket.socket, loader: Loader) -> int:
    """Be the worker of *spec* until there is a reason to end; return the exit code."""
    return await Worker(spec, channel, listener, loader).run()


class Worker:
    """One worker, from its hello to its exit code; made on the loop that runs it."""

    def __init__(
        self, spec: WorkerSpec, channel: Channel, listener: socket.socket, loader: Loader
    ) -> None:
        self._spec = spec
        self._channel = channel
        self._listener = listener
        self._loader = loader
        self._loop = asyncio.get_running_loop()
        self._serving = Serving(spec)
        self._ending = asyncio.Event()
        self._ended = threading.Event()
        self._fatal: Fatal | None = None
        self._told: RequestCounts | None = None

    async def run(self) -> int:
        """Serve until there is a reason to end; return the exit code."""
        self._loop.add_signal_handler(signal.SIGTERM, self._terminated)
        runner = await self._listen()
        self._channel.listen(self._received, self._lease_lost)
        async with asyncio.TaskGroup() as tasks:
            life = tasks.create_task(self._load_and_report())
            await self._ending.wait()
            await self._drain()
            life.cancel()
        if self._serving.loaded is not None:
            self._push(self._serving.snapshot())  # what the drain has finished counts too
        await runner.cleanup()
        await self._close_engine()
        self._ended.set()
        return WorkerExit.OK if self._fatal is None else self._fatal.code

    def end(self, within_s: float, fatal: Fatal | None = None) -> None:
        """Take no more requests, give the open ones *within_s* seconds, then end; again: only sooner."""
        self._loop.call_later(within_s, self._serving.interrupt)
        if fatal is not None and self._fatal is None:
            self._fatal = fatal
            self._channel.send(fatal)
            sys.stderr.write(f"tqd worker {self._spec.name}: {fatal.message}\n")
        self._serving.phase = Phase.DRAINING if self._fatal is None else Phase.FAILED
        self._ending.set()

    async def _listen(self) -> web.AppRunner:
        runner = web.AppRunner(
            build_app(self._serving),
            handler_cancellation=True,  # a client that leaves cancels its handler, which aborts its sequences
            access_log=None,
            shutdown_timeout=INTERRUPT_S,
            logger=_http_logger(),
        )
        await runner.setup()
        await web.SockSite(runner, self._listener).start()
        return runner

    async def _load_and_report(self) -> None:
        """Load the model, say so, and push a snapshot each second from then on."""
        started = time.monotonic()
        try:
            get_logger().info("model.loading", model=self._spec.server.model)
            loaded = await in_thread(self._load, "load")
        except WorkerExitError as error:
            self._fail(error.code, error.message, error.hint)
            return
        except PolicyError as error:
            self._fail(WorkerExit.BAD_CONFIG, error.message, error.hint)
            return
        except Exception as error:  # noqa: BLE001 - whatever loading raised, the supervisor must hear it
            get_logger().exception("engine.failed")
            self._fail(WorkerExit.ENGINE_FAILED, f"loading failed: {type(error).__name__}: {error}")
            return
        load_s = time.monotonic() - started
        self._serving.load(loaded)
        log, kv = get_logger(), loaded.kv
        log.info("model.loaded", load_s=round(load_s, 3), device=loaded.model.device)
        log.info("policy.resolved", kv=kv.summary, attention=kv.backend, packing=kv.packing_backend)
        for warning in kv.warnings:
            log.warning("policy.warned", warning=warning)
        self._channel.send(
            Ready(
                nonce=self._spec.nonce,
                spec_hash=self._serving.spec_hash,
                load_s=load_s,
                model=loaded.model,
                kv=loaded.kv,
            )
        )
        await self._push_snapshots()

    async def _push_snapshots(self) -> None:
        """Push what has changed each second; when nothing has, now and then that the engine moves."""
        pushed: Snapshot | None = None
        pushed_at = 0.0
        while True:
            snapshot, now = self._serving.snapshot(), time.monotonic()
            heartbeat_s = min(HEARTBEAT_S, self._serving.server.probe.stall / 4)
            if now - pushed_at >= heartbeat_s or not _same(snapshot, pushed):
                self._push(snapshot)
                pushed, pushed_at = snapshot, now
            await asyncio.sleep(SNAPSHOT_S)

    def _push(self, now: Snapshot) -> None:
        """Push a snapshot; the counts of requests only where they have changed, so that idle workers cost little."""
        news = now if now.requests != self._told else now.model_copy(update={"requests": None})
        if self._channel.send(news):
            self._told = now.requests

    def _load(self) -> LoadedEngine:
        return self._loader(self._spec, progress=self._progressed, on_failure=self._engine_failed)

    async def _drain(self) -> None:
        """Return once no request is open, or those that ran out of time had their chance to say so."""
        idle = asyncio.ensure_future(self._serving.wait_idle())
        ends: list[asyncio.Future[None]] = [idle, self._serving.interrupted]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([idle], timeout=INTERRUPT_S)
        idle.cancel()

    async def _close_engine(self) -> None:
        self._serving.close()
        loaded = self._serving.loaded
        if loaded is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await in_thread(loaded.close, "close")

    def _fail(self, code: WorkerExit, message: str, hint: str | None = None) -> None:
        self.end(FAILURE_DRAIN_S, Fatal(code=code, message=message, hint=hint))

    def _terminated(self) -> None:
        self.end(self._serving.server.drain_timeout)

    def _handle(self, message: Live | Drain) -> None:
        match message:
            case Drain():
                self.end(message.timeout_s)
            case Live():
                self._serving.apply(message)
                self._channel.send(Ack(spec_hash=message.spec_hash))

    def _lose_lease(self) -> None:
        get_logger().warning("lease.lost", drain_s=LEASE_DRAIN_S)
        self.end(LEASE_DRAIN_S)

    def _lose_engine(self, error: BaseException) -> None:
        self._fail(WorkerExit.ENGINE_FAILED, f"the engine failed: {type(error).__name__}: {error}")

    # What follows is called by other threads.

    def _received(self, message: Live | Drain) -> None:
        self._post(self._handle, message)

    def _lease_lost(self) -> None:
        self._post(self._lose_lease)
        if not self._ended.wait(STUCK_S):
            os._exit(WorkerExit.ENGINE_FAILED)  # the loop is stuck, and nobody else will end us

    def _engine_failed(self, error: BaseException) -> None:
        self._post(self._lose_engine, error)

    def _progressed(self, stage: str, fraction: float) -> None:
        self._serving.progress = (stage, fraction)
        self._channel.send(Progress(stage=stage, fraction=fraction))

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *arguments)


def in_thread(work: Callable[[], ResultT], name: str) -> asyncio.Future[ResultT]:
    """Run *work* on a thread that does not hold up the end of the process; await its outcome."""
    outcome: concurrent.futures.Future[ResultT] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # from here on only the thread settles it

    def body() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)


def _http_logger() -> logging.Logger:
    """Return the logger for aiohttp's own complaints: one line each, no parts of requests."""
    logger = logging.getLogger("daemon.worker.http")
    logger.propagate = False
    logger.handlers = [_HttpFailures(logging.ERROR)]
    return logger


class _HttpFailures(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        get_logger().warning("http.failed", error=type(error).__name__, where=record.funcName)


def _same(snapshot: Snapshot, pushed: Snapshot | None) -> bool:
    """Whether only the engine's loop has moved between the two."""
    if pushed is None:
        return False
    moved = {"generation": snapshot.generation, "passed_at": snapshot.passed_at}
    return snapshot == pushed.model_copy(update=moved)
