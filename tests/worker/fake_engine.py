"""An engine without a model: scripted tokens, delays and failures, and a count of what it still holds."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from daemon.config.wire import KvReport, LayerReport, ModelReport, WorkerSpec
from daemon.worker.requests import (
    EngineFailedError,
    EngineStats,
    GenerationRequest,
    QueueFullError,
    TokenEvent,
)
from tests.worker.small_tokenizer import small_tokenizer

MAX_CONTEXT = 512
BYTES_PER_TOKEN = 100
WORDS = ("Paris", "Madrid", "the", "capital", "of", "France", "Spain", "is")


@dataclass
class Script:
    """What the engine does with each request; a reply of None is made of the seed."""

    reply: str | Sequence[int] | None = "The capital of France is Paris."
    queued_s: float = 0.0
    step_s: float = 0.0
    fail_after: int | None = None
    batch: int = 1
    held: Callable[[int], bool] = lambda tokens: False
    """Whether a sequence stays where it is, after so many tokens."""


class FakeGeneration:
    """One scripted sequence."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self.request = request
        self.prompt_read = False
        self._engine = engine
        self._batches: asyncio.Queue[Sequence[TokenEvent] | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._produce())
        self._task.add_done_callback(lambda _: engine.drop(self))

    async def __aiter__(self) -> AsyncIterator[Sequence[TokenEvent]]:
        while True:
            batch = await self._batches.get()
            if batch is None:
                raise EngineFailedError("the engine stopped")
            yield batch

    def abort(self) -> None:
        self._engine.aborted += 0 if self._task.done() else 1
        self._task.cancel()

    def fail(self) -> None:
        self._batches.put_nowait(None)
        self._task.cancel()

    async def _produce(self) -> None:
        script = self._engine.script
        async with self._engine.places:
            self._engine.running.add(self)
            await asyncio.sleep(script.queued_s)
            self._engine.prompt_tokens += len(self.request.prompt)
            events = enumerate(self._events(script), 1)
            for batch in iter(lambda: list(itertools.islice(events, script.batch)), []):
                await asyncio.sleep(script.step_s)
                while script.held(batch[0][0] - 1):  # noqa: ASYNC110 - it may be another process that lets go
                    await asyncio.sleep(0.002)
                self._engine.generated += len(batch)
                self._batches.put_nowait([event for _, event in batch])
                if script.fail_after is not None and batch[-1][0] >= script.fail_after:
                    self._engine.fail(RuntimeError("scripted failure"))

    def _events(self, script: Script) -> Iterator[TokenEvent]:
        request = self.request
        for count, token in enumerate(self._tokens(script), 1):
            if token in self._engine.eos and not request.ignore_eos:
                yield self._event(token, "stop")
                return
            if count >= request.max_tokens:
                yield self._event(token, "length")
                return
            yield self._event(token, None)

    def _tokens(self, script: Script) -> Iterator[int]:
        tokenizer = self._engine.tokenizer
        eos = tokenizer.eos_token_id
        reply = script.reply
        if reply is None:
            rng = random.Random(self.request.sampling.seed)
            text = " ".join(rng.choice(WORDS) for _ in range(12))
            reply = tokenizer.encode(text, add_special_tokens=False)
        elif isinstance(reply, str):
            reply = tokenizer.encode(reply, add_special_tokens=False)
        return itertools.cycle([*reply, eos])

    def _event(self, token: int, finish: str | None) -> TokenEvent:
        top = self.request.top_logprobs
        if top is None:
            return TokenEvent(token, finish)
        others = [other for other in range(2, 2 + top) if other != token]
        ranked = [(token, -0.5), *((other, -2.0 - other / 100) for other in others)]
        return TokenEvent(token, finish, logprob=-0.5, top=tuple(ranked[:top]))


@dataclass
class FakeEngine:
    """Implements daemon.worker.requests.Engine on the event loop."""

    script: Script = field(default_factory=Script)
    max_concurrent: int = 8
    queue: int = 64
    on_failure: Callable[[BaseException], None] = lambda error: None
    tokenizer: Any = field(default_factory=small_tokenizer)

    def __post_init__(self) -> None:
        self.open: set[FakeGeneration] = set()
        self.running: set[FakeGeneration] = set()
        self.submitted: list[GenerationRequest] = []
        self.aborted = 0
        self.generated = 0
        self.prompt_tokens = 0
        self.passes = itertools.count(1)
        self.frozen: int | None = None
        self.failed = False
        self.refusal: Exception | None = None
        self.kv_limit_bytes: int | None = None
        self.memory_limit_bytes: int | None = None
        self.places = asyncio.Semaphore(self.max_concurrent)
        self.eos = {self.tokenizer.eos_token_id}

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.failed:
            raise EngineFailedError("the engine stopped")
        if self.refusal is not None:
            raise self.refusal
        if len(self.open) >= self.max_concurrent + self.queue:
            raise QueueFullError(1 + len(self.open) // self.max_concurrent)
        self.submitted.append(request)
        generation = FakeGeneration(self, request)
        self.open.add(generation)
        return generation

    def stats(self) -> EngineStats:
        tokens = sum(len(generation.request.prompt) for generation in self.running)
        return EngineStats(
            generation=self.frozen or next(self.passes),
            passed_at=time.time(),
            running=len(self.running),
            waiting=len(self.open) - len(self.running),
            prompt_tokens_total=self.prompt_tokens,
            generation_tokens_total=self.generated,
            kv_bytes=tokens * BYTES_PER_TOKEN,
            kv_tokens=tokens,
            kv_reserved_bytes=tokens * BYTES_PER_TOKEN,
            kv_limit_bytes=self.kv_limit_bytes,
        )

    def set_limits(
        self,
        *,
        max_concurrent: int,
        queue: int,
        kv_limit_bytes: int | None,
        memory_limit_bytes: int | None,
    ) -> None:
        self.max_concurrent, self.queue = max_concurrent, queue
        self.kv_limit_bytes, self.memory_limit_bytes = kv_limit_bytes, memory_limit_bytes
        self.places = asyncio.Semaphore(max_concurrent)

    def drop(self, generation: FakeGeneration) -> None:
        self.open.discard(generation)
        self.running.discard(generation)

    def fail(self, error: BaseException) -> None:
        self.failed = True
        for generation in tuple(self.open):
            generation.fail()
        self.on_failure(error)


@dataclass(frozen=True)
class FakeLoaded:
    """Implements daemon.worker.serving.LoadedEngine."""

    engine: FakeEngine
    model: ModelReport
    kv: KvReport
    max_context: int = MAX_CONTEXT
    closed: list[bool] = field(default_factory=list)

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def eos_token_ids(self) -> set[int]:
        return self.engine.eos

    def close(self) -> None:
        self.closed.append(True)


def fake_loaded(spec: WorkerSpec, engine: FakeEngine) -> FakeLoaded:
    """Return *engine* with reports about a model that does not exist."""
    layers = LayerReport(first=0, last=3, kind="full", requested="turbo8v4", effective="turbo8v4")
    return FakeLoaded(
        engine,
        ModelReport(
            id=spec.server.model,
            path=spec.model_path,
            model_type="llama",
            layers=4,
            max_context=MAX_CONTEXT,
            weights_bytes=1000,
            device="cpu",
            mlx_version="0",
            mlx_lm_version="0",
        ),
        KvReport(
            policy=spec.kv.policy,
            summary="turbo8v4 on 4 of 4 layers",
            layers=(layers,),
            effective={"turbo8v4": 4},
            sink_tokens=4,
            tail_tokens=32,
            backend="reference",
            bytes_per_token=float(BYTES_PER_TOKEN),
            bytes_per_token_fp16=256.0,
        ),
    )
