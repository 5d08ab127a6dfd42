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
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from daemon.config import wire
from daemon.log import get_logger
from daemon.worker import model as model_loading
from daemon.worker.model import LoadedModel, Progress
from daemon.worker.requests import (
    EngineFailedError,
    EngineStats,
    GenerationRequest,
    QueueFullError,
    TokenEvent,
)
from daemon.worker.sampling import make_logits_processors, make_sampler

IDLE_PASS_S = 0.2
STATS_EVERY_S = 0.5
PREFILL_ROWS = 4  # prompts read together; more would make a decode step wait longer
# Prompt tokens between two decode steps: what a running stream waits for at most. A CPU reads some 150 tokens a second.
PREFILL_CHUNK = {"cpu": 128, "gpu": 1024}
MAX_CACHE_BYTES = 2 * 2**30  # freed buffers that MLX may keep for reuse

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


class _Stop:
    pass


_Command = _Submit | _Abort | _Limits | _Stop


class MlxEngine:
    """Continuous batching on one thread; implements daemon.worker.requests.Engine."""

    def __init__(
        self, *, max_concurrent: int, waiting: int, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._lock = threading.Lock()  # guards the three fields below, which both threads use
        self._open: set[MlxGeneration] = set()
        self._failed = False
        self._stats = EngineStats()
        self._max_concurrent = max_concurrent
        self._waiting_limit = waiting
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
        """Queue *request*; call it on an event loop. Raises QueueFullError or EngineFailedError."""
        generation = MlxGeneration(self, request, asyncio.get_running_loop())
        with self._lock:
            if self._failed:
                raise EngineFailedError("the engine stopped")
            if len(self._open) >= self._max_concurrent + self._waiting_limit:
                raise QueueFullError(self._retry_after_s())
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

    def set_limits(self, *, max_concurrent: int, queue: int) -> None:
        """Change the admission limits; running sequences are not touched."""
        with self._lock:
            self._max_concurrent, self._waiting_limit = max_concurrent, queue
        self._commands.put(_Limits(max_concurrent))

    def close(self) -> None:
        """Stop the thread and wait for it; open generations fail."""
        self._commands.put(_Stop())
        if self._thread is not None:
            self._thread.join()

    def _retry_after_s(self) -> int:
        # a place is free when the shortest running request ends; nobody knows when, so say "soon", bounded
        return min(30, 1 + len(self._open) // max(1, self._max_concurrent))

    # Everything below runs on the MLX thread.

    def _run(self, spec: wire.WorkerSpec, progress: Progress, loaded: Future[LoadedModel]) -> None:
        try:
            _limit_memory(spec.memory_limit_bytes)
            ready = model_loading.load(spec, progress)
            batching = _Batching(ready, self._max_concurrent)
        except BaseException as error:  # noqa: BLE001 - carried to the caller of start
            loaded.set_exception(error)
            return
        loaded.set_result(ready)
        try:
            self._generate(batching)
        except BaseException as error:  # noqa: BLE001 - whatever it was, this engine is over and must say so
            self._fail(error)
        else:
            self._fail(None)

    def _generate(self, batching: _Batching) -> None:
        published = 0.0
        while True:
            for command in self._next_commands(idle=batching.idle):
                match command:
                    case _Submit(generation):
                        batching.add(generation)
                    case _Abort(generation):
                        batching.drop(generation)
                    case _Limits(max_concurrent):
                        batching.set_max_concurrent(max_concurrent)
                    case _Stop():
                        return
            delivery = batching.step()
            self._deliver(delivery)
            now = time.monotonic()
            due = now - published >= STATS_EVERY_S
            self._publish(batching, measured=due)
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

    def _publish(self, batching: _Batching, *, measured: bool) -> None:
        with self._lock:
            stats = self._stats
        stats = replace(
            stats,
            generation=stats.generation + 1,
            running=batching.running,
            waiting=batching.waiting,
            prompt_tokens_total=batching.prompt_tokens_total,
            generation_tokens_total=batching.generation_tokens_total,
        )
        if measured:
            kv_bytes, kv_tokens = batching.kv_usage()
            stats = replace(
                stats,
                kv_bytes=kv_bytes,
                kv_tokens=kv_tokens,
                mlx_active_bytes=mx.get_active_memory(),
                mlx_cache_bytes=mx.get_cache_memory(),
                mlx_peak_bytes=mx.get_peak_memory(),
            )
        with self._lock:
            self._stats = stats

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


def _limit_memory(memory_limit_bytes: int | None) -> None:
    if memory_limit_bytes is not None:
        mx.set_memory_limit(memory_limit_bytes)
        mx.set_cache_limit(min(MAX_CACHE_BYTES, memory_limit_bytes // 4))


class _Batching:
    """mlx-lm's BatchGenerator, the line of requests before it, and who each of its rows belongs to."""

    def __init__(self, loaded: LoadedModel, max_concurrent: int) -> None:
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self._line: deque[MlxGeneration] = deque()
        self._rows: dict[int, MlxGeneration] = {}
        self._prompt_done: dict[int, int] = {}  # tokens read of each prompt that is being read
        self._batching = loaded.batching
        self._max_concurrent, prefill_rows = self._most_rows(max_concurrent)
        self._stops = StopSequences([[token] for token in sorted(loaded.eos_token_ids)])
        self._no_stops = StopSequences()
        device = mx.default_device()
        self._generator = BatchGenerator(
            loaded.model,
            completion_batch_size=self._max_concurrent,
            prefill_batch_size=prefill_rows,
            prefill_step_size=PREFILL_CHUNK["cpu" if device == mx.Device(mx.cpu) else "gpu"],
            stream=mx.default_stream(device),
        )
        # it has just wired the recommended maximum of the whole machine for this one process: undo that
        self._generator.close()

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def idle(self) -> bool:
        return not self._rows and not self._line

    def add(self, generation: MlxGeneration) -> None:
        self._line.append(generation)

    def drop(self, generation: MlxGeneration) -> None:
        if generation in self._line:
            self._line.remove(generation)
        uids = [uid for uid, owner in self._rows.items() if owner is generation]
        if uids:
            self._generator.remove(uids)
            for uid in uids:
                del self._rows[uid]
                self._prompt_done.pop(uid, None)

    def set_max_concurrent(self, max_concurrent: int) -> None:
        self._max_concurrent, prefill_rows = self._most_rows(max_concurrent)
        self._generator.completion_batch_size = self._max_concurrent
        self._generator.prefill_batch_size = prefill_rows

    def _most_rows(self, max_concurrent: int) -> tuple[int, int]:
        """Return how many sequences may decode, and how many prompts may be read, together."""
        rows = 1 if self._batching == "alone" else max_concurrent
        return rows, min(PREFILL_ROWS, rows) if self._batching == "rows" else 1

    def step(self) -> dict[MlxGeneration, list[TokenEvent]]:
        """Admit what fits, run one decode step and one prefill chunk, and return the new tokens by sequence."""
        while self._line and len(self._rows) < self._max_concurrent:
            self._insert(self._line.popleft())
        if not self._rows:
            return {}
        progress, responses = self._generator.next()
        self._count_prompt_tokens(progress)
        delivery: dict[MlxGeneration, list[TokenEvent]] = {}
        for response in responses:
            generation = self._rows[response.uid]
            delivery.setdefault(generation, []).append(_event(generation.request, response))
            if response.finish_reason is not None:
                del self._rows[response.uid]
        self.generation_tokens_total += len(responses)
        return delivery

    def _count_prompt_tokens(self, progress: Sequence[Any]) -> None:
        """Count prompt tokens as they are read, so that an aborted prompt counts only as far as it came."""
        for report in progress:
            done = report.progress[0]
            self.prompt_tokens_total += done - self._prompt_done.get(report.uid, 0)
            self._prompt_done[report.uid] = done
            if report.end_of_prompt:
                del self._prompt_done[report.uid]

    def kv_usage(self) -> tuple[int, int]:
        """Return the bytes allocated for live sequences and the tokens they hold."""
        caches = [
            *self._generator._prompt_batch.prompt_cache,
            *self._generator._generation_batch.prompt_cache,
        ]
        tokens = sum(
            len(tokens)
            for batch in (self._generator._prompt_batch, self._generator._generation_batch)
            for tokens in batch.tokens
        )
        return sum(cache.nbytes for cache in caches), tokens

    def _insert(self, generation: MlxGeneration) -> None:
        request = generation.request
        (uid,) = self._generator.insert(
            [list(request.prompt)],
            max_tokens=[request.max_tokens],
            samplers=[make_sampler(request.sampling)],
            logits_processors=[make_logits_processors(request.sampling, len(request.prompt))],
            stop_sequences=[self._no_stops if request.ignore_eos else self._stops],
        )
        self._rows[uid] = generation


def _event(request: GenerationRequest, response: Any) -> TokenEvent:
    if request.top_logprobs is None:
        return TokenEvent(response.token, finish=response.finish_reason)
    logprobs = response.logprobs
    top: tuple[tuple[int, float], ...] = ()
    if request.top_logprobs:
        best = mx.argsort(-logprobs)[: request.top_logprobs]
        ids, values = cast("list[int]", best.tolist()), cast("list[float]", logprobs[best].tolist())
        top = tuple(zip(ids, values, strict=True))
    return TokenEvent(
        response.token,
        finish=response.finish_reason,
        logprob=logprobs[response.token].item(),
        top=top,
    )
