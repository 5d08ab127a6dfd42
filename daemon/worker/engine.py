"""The engine: one thread that owns MLX, loads the model and generates for every request.

The event loop never touches MLX. It leaves commands in a queue and gets tokens back in batches, one
`call_soon_threadsafe` for each pass of the loop. The loop passes at least five times a second, idle or
not, and counts its passes: that counter is how the supervisor knows that the engine lives. An exception
in the loop ends the engine: every open generation fails, and the worker is replaced.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from daemon.config import wire
from daemon.log import get_logger
from daemon.policy.claim import KEPT_BYTES, PROCESS_BYTES
from daemon.worker import model as model_loading
from daemon.worker.admission import Costs, kv_limit
from daemon.worker.model import LoadedModel, Progress
from daemon.worker.requests import (
    EngineFailedError,
    EngineStats,
    GenerationRequest,
    QueueFullError,
    TokenEvent,
    TooLargeError,
)
from daemon.worker.scheduler import Scheduler
from daemon.worker.warmup import compiles_at_first_use, warm_up

IDLE_PASS_S = 0.2
STATS_EVERY_S = 0.5

log = get_logger()


@dataclass(frozen=True)
class LoadedEngine:
    """A running engine and what the HTTP side needs to know about its model."""

    engine: MlxEngine
    tokenizer: Any
    model: wire.ModelReport
    kv: wire.KvReport
    max_context: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def close(self) -> None:
        """Stop the engine's thread; open generations fail."""
        self.engine.close()


def start_engine(
    spec: wire.WorkerSpec, *, progress: Progress, on_failure: Callable[[BaseException], None]
) -> LoadedEngine:
    """Start the MLX thread, load the model on it, and return once it can generate.

    *progress* and *on_failure* are called on the MLX thread.

    Raises:
        WorkerExitError: the model cannot be loaded.
    """
    engine = MlxEngine(
        max_concurrent=spec.server.max_concurrent, waiting=spec.server.queue, on_failure=on_failure
    )
    loaded = engine.start(spec, progress)
    return LoadedEngine(
        engine=engine,
        tokenizer=loaded.tokenizer,
        model=loaded.model_report,
        kv=loaded.kv_report,
        max_context=loaded.max_context,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
    )


class MlxGeneration:
    """One sequence: an async iterator of token batches. Made by MlxEngine.submit, used on the event loop."""

    def __init__(
        self, engine: MlxEngine, request: GenerationRequest, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request = request
        self.loop = loop
        self.submitted_at = time.monotonic()
        self._engine = engine
        self._batches: asyncio.Queue[Sequence[TokenEvent] | None] = asyncio.Queue()
        self._ended = False

    def deliver(self, batch: Sequence[TokenEvent] | None) -> None:
        """Hand over a batch, or None for a failure; runs on the event loop."""
        self._batches.put_nowait(batch)

    async def __aiter__(self) -> AsyncIterator[Sequence[TokenEvent]]:
        """Yield batches until one holds a finish reason; raises EngineFailedError."""
        while not self._ended:
            batch = await self._batches.get()
            if batch is None:
                self._ended = True
                raise EngineFailedError("the engine stopped")
            self._ended = batch[-1].finish is not None
            yield batch

    def abort(self) -> None:
        """End the sequence within one step."""
        if not self._ended:
            self._ended = True
            self._engine.abort(self)


@dataclass(frozen=True, slots=True)
class _Submit:
    generation: MlxGeneration


@dataclass(frozen=True, slots=True)
class _Abort:
    generation: MlxGeneration


@dataclass(frozen=True, slots=True)
class _Limits:
    max_concurrent: int
    kv_limit_bytes: int | None
    memory_limit_bytes: int | None


class _Stop:
    pass


_Command = _Submit | _Abort | _Limits | _Stop


class MlxEngine:
    """Continuous scheduler on one thread; implements daemon.worker.requests.Engine."""

    def __init__(
        self, *, max_concurrent: int, waiting: int, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._lock = threading.Lock()  # guards the fields below, which both threads use
        self._open: set[MlxGeneration] = set()
        self._failed = False
        self._stats = EngineStats()
        self._max_concurrent = max_concurrent
        self._waiting_limit = waiting
        self._kv_limit_bytes: int | None = None
        self._costs: Costs | None = None
        self._waits_for_memory = False
        self._thread: threading.Thread | None = None

    def start(self, spec: wire.WorkerSpec, progress: Progress) -> LoadedModel:
        """Load the model on the engine's thread and begin to generate; returns when it is loaded."""
        loaded: Future[LoadedModel] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(spec, progress, loaded), name="mlx", daemon=True
        )
        self._thread.start()
        return loaded.result()

    def submit(self, request: GenerationRequest) -> MlxGeneration:
        """Queue *request*; call it on an event loop. Raises QueueFullError, TooLargeError or EngineFailedError."""
        generation = MlxGeneration(self, request, asyncio.get_running_loop())
        with self._lock:
            if self._failed:
                raise EngineFailedError("the engine stopped")
            self._refuse_too_large(len(request.prompt) + request.max_tokens)
            if len(self._open) >= self._max_concurrent + self._waiting_limit:
                raise QueueFullError(self._retry_after_s(), for_memory=self._waits_for_memory)
            self._open.add(generation)
        self._commands.put(_Submit(generation))
        return generation

    def abort(self, generation: MlxGeneration) -> None:
        """End *generation* within one step; its place in the line is free at once."""
        self._close(generation)
        self._commands.put(_Abort(generation))

    def stats(self) -> EngineStats:
        """Return the latest numbers without waiting for the thread."""
        with self._lock:
            return self._stats

    def set_limits(
        self,
        *,
        max_concurrent: int,
        queue: int,
        kv_limit_bytes: int | None,
        memory_limit_bytes: int | None,
    ) -> None:
        """Change the admission limits, and what MLX may use; running sequences are not touched."""
        with self._lock:
            self._max_concurrent, self._waiting_limit = max_concurrent, queue
            self._kv_limit_bytes = kv_limit_bytes
        self._commands.put(_Limits(max_concurrent, kv_limit_bytes, memory_limit_bytes))

    def close(self) -> None:
        """Stop the thread and wait for it; open generations fail."""
        self._commands.put(_Stop())
        if self._thread is not None:
            self._thread.join()

    def _refuse_too_large(self, tokens: int) -> None:
        limit, costs = self._kv_limit_bytes, self._costs
        if limit is None or costs is None:
            return
        needed = costs.total_bytes([tokens])
        if needed > limit:
            raise TooLargeError(tokens, needed, limit)

    def _retry_after_s(self) -> int:
        # a place is free when the shortest running request ends; nobody knows when, so say "soon", bounded
        return min(30, 1 + len(self._open) // max(1, self._max_concurrent))

    # Everything below runs on the MLX thread.

    def _run(self, spec: wire.WorkerSpec, progress: Progress, loaded: Future[LoadedModel]) -> None:
        try:
            _limit_memory(spec.memory_limit_bytes, spec.memory_reserve_bytes)
            ready = model_loading.load(spec, progress)
            limit = kv_limit(
                spec.server,
                share_bytes=spec.memory_limit_bytes,
                reserve_bytes=spec.memory_reserve_bytes,
                weights_bytes=ready.model_report.weights_bytes,
            )
            if compiles_at_first_use():
                warm_up(ready, self._max_concurrent, progress)
            scheduler: Scheduler[MlxGeneration] = Scheduler(ready, self._max_concurrent, limit)
            with self._lock:
                self._costs, self._kv_limit_bytes = ready.costs, limit
        except BaseException as error:  # noqa: BLE001 - carried to the caller of start
            loaded.set_exception(error)
            return
        loaded.set_result(ready)
        try:
            self._generate(scheduler, spec.memory_reserve_bytes)
        except BaseException as error:  # noqa: BLE001 - whatever it was, this engine is over and must say so
            self._fail(error)
        else:
            self._fail(None)

    def _generate(self, scheduler: Scheduler[MlxGeneration], reserve_bytes: int) -> None:
        published = 0.0
        while True:
            for command in self._next_commands(idle=scheduler.idle):
                match command:
                    case _Submit(generation):
                        scheduler.add(generation)
                    case _Abort(generation):
                        scheduler.drop(generation)
                    case _Limits(max_concurrent, kv_limit_bytes, memory_limit_bytes):
                        scheduler.set_max_concurrent(max_concurrent)
                        scheduler.kv_limit_bytes = kv_limit_bytes
                        _limit_memory(memory_limit_bytes, reserve_bytes)
                    case _Stop():
                        return
            delivery = scheduler.step()
            ended = any(events[-1].finish is not None for events in delivery.values())
            now = time.monotonic()
            due = ended or now - published >= STATS_EVERY_S
            # before the tokens are handed over: who has an answer finds all of it counted
            self._publish(scheduler, measured=due)
            self._deliver(delivery)
            if due:
                published = now

    def _next_commands(self, *, idle: bool) -> list[_Command]:
        commands = []
        try:
            if idle:
                commands.append(self._commands.get(timeout=IDLE_PASS_S))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _deliver(self, delivery: dict[MlxGeneration, list[TokenEvent]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[MlxGeneration, list[TokenEvent]]]] = {}
        for generation, events in delivery.items():
            if events[-1].finish is not None:
                self._close(generation)
            by_loop.setdefault(generation.loop, []).append((generation, events))
        for loop, batches in by_loop.items():
            _call_soon(loop, _hand_over, batches)

    def _close(self, generation: MlxGeneration) -> None:
        with self._lock:
            self._open.discard(generation)

    def _publish(self, scheduler: Scheduler[MlxGeneration], *, measured: bool) -> None:
        with self._lock:
            stats = self._stats
        stats = replace(
            stats,
            generation=stats.generation + 1,
            passed_at=time.time(),
            running=scheduler.running,
            waiting=scheduler.waiting,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            generation_tokens_total=scheduler.generation_tokens_total,
            kv_reserved_bytes=scheduler.reserved_bytes,
            kv_limit_bytes=scheduler.kv_limit_bytes,
        )
        if measured:
            kv_bytes, kv_tokens = scheduler.kv_usage()
            stats = replace(
                stats,
                kv_bytes=kv_bytes,
                kv_tokens=kv_tokens,
                mlx_active_bytes=mx.get_active_memory(),
                mlx_cache_bytes=mx.get_cache_memory(),
                mlx_peak_bytes=mx.get_peak_memory(),
                queue_time_s=scheduler.queue_time_s.read(),
                packing_s=scheduler.packing_s,
            )
        with self._lock:
            self._stats = stats
            self._waits_for_memory = scheduler.waits_for_memory

    def _fail(self, error: BaseException | None) -> None:
        with self._lock:
            self._failed = True
            orphans, self._open = self._open, set()
        for generation in orphans:
            _call_soon(generation.loop, generation.deliver, None)
        if error is not None:
            log.error("engine.failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            self._on_failure(error)


def _hand_over(batches: Sequence[tuple[MlxGeneration, list[TokenEvent]]]) -> None:
    for generation, events in batches:
        generation.deliver(events)


def _call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *arguments)


def _limit_memory(share_bytes: int | None, reserve_bytes: int) -> None:
    """Keep MLX to this worker's share: what it allocates, what it keeps for reuse, and what a Mac's GPU wires.

    The limits make MLX give back what it keeps; none of them makes an allocation fail (daemon.worker.admission).
    """
    if share_bytes is None:
        return
    mx.set_memory_limit(share_bytes)
    mx.set_cache_limit(min(KEPT_BYTES, max(0, reserve_bytes - PROCESS_BYTES) // 2))
    if mx.metal.is_available():
        most = mx.device_info().get("max_recommended_working_set_size", share_bytes)
        mx.set_wired_limit(min(share_bytes, int(most)))
