"""What the HTTP side knows of its worker: the phase, the live settings, the engine, the numbers.

Written by the worker's life (daemon.worker.serve), read by the routes. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import PurePath
from typing import Protocol
from uuid import uuid4

from daemon.config.spec import ServerSpec
from daemon.config.wire import KvReport, Live, ModelReport, OpenRequest, Snapshot, WorkerSpec
from daemon.worker.admission import kv_limit
from daemon.worker.api import errors
from daemon.worker.api.prompts import Prompts, Tokenizer
from daemon.worker.metrics import RequestMetrics
from daemon.worker.requests import Engine, EngineStats
from daemon.worker.vocabulary import Vocabulary

RATE_WINDOW_S = 60.0
MOST_OPEN = 100  # of the open requests that a snapshot tells


class Phase(StrEnum):
    """Where a worker is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class LoadedEngine(Protocol):
    """What loading a model gives."""

    @property
    def engine(self) -> Engine:
        """The running engine."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def model(self) -> ModelReport:
        """Facts about the model."""
        ...

    @property
    def kv(self) -> KvReport:
        """The effective KV policy."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens that one sequence may hold, prompt included."""
        ...

    @property
    def vocab_size(self) -> int:
        """The width of the model's logits."""
        ...

    @property
    def eos_token_ids(self) -> AbstractSet[int]:
        """The tokens that end an answer."""
        ...

    def close(self) -> None:
        """End the engine's thread; running sequences fail."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as the routes use it."""

    loaded: LoadedEngine
    prompts: Prompts
    vocabulary: Vocabulary


class Progress(Protocol):
    """How far a request is; *started* is on the monotonic clock."""

    started: float
    stream: bool
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Counters:
    """Requests for generation since the start; the engine counts tokens itself."""

    requests: int = 0
    errors: int = 0
    rejected: int = 0
    cancelled: int = 0


class Rates:
    """Tokens per second over the last minute, from counters sampled now and then."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int, int]] = deque()

    def sample(self, now: float, prompt_tokens: int, generation_tokens: int) -> tuple[float, float]:
        """Take the counters at *now* (seconds) and return (prompt, decode) tokens per second."""
        self._samples.append((now, prompt_tokens, generation_tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()
        then, prompt, generation = self._samples[0]
        elapsed = now - then
        if elapsed <= 0:
            return 0.0, 0.0
        return (prompt_tokens - prompt) / elapsed, (generation_tokens - generation) / elapsed


class Serving:
    """The state of one worker; needs a running event loop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.server: ServerSpec = spec.server
        self.api_key = spec.api_key
        self.spec_hash = spec.spec_hash
        self.memory_limit_bytes = spec.memory_limit_bytes
        self.phase = Phase.LOADING
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.counters = Counters()
        self.metrics = RequestMetrics(RATE_WINDOW_S)
        self.created = int(time.time())
        self.interrupted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._model: Model | None = None
        self._open: dict[int, tuple[str, Progress]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._rates = Rates()
        self._generation = -1
        self._moved_at = time.monotonic()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients are told, the server's own first."""
        return tuple(dict.fromkeys((self.spec.name, *self.server.aliases)))

    @property
    def model_name(self) -> str:
        """The model as a hub id, or the name of its folder; a whole path is nobody's business."""
        path = PurePath(self.server.model)
        return path.name if path.is_absolute() else self.server.model

    @property
    def model(self) -> Model:
        """The loaded model.

        Raises:
            ApiError: it is not loaded yet, or the worker takes no more requests.
        """
        if self.phase is Phase.DRAINING:
            raise errors.draining()
        if self.phase is Phase.FAILED:
            raise errors.engine_gone()
        if self._model is None:
            stage, fraction = self.progress
            raise errors.not_ready(
                "model_loading",
                f"The model is loading ({stage}, {fraction:.0%}); try again soon.",
                5,
                {"progress": {"stage": stage, "fraction": fraction}},
            )
        return self._model

    @property
    def loaded(self) -> LoadedEngine | None:
        """What was loaded, in any phase; None before that."""
        return None if self._model is None else self._model.loaded

    def stats(self) -> EngineStats:
        """Return the engine's numbers; zeros before it runs."""
        return EngineStats() if self._model is None else self._model.loaded.engine.stats()

    def check_name(self, name: str | None) -> None:
        """Refuse a model name that is not ours; a request may leave it out, there is only one.

        Raises:
            ApiError: the name is neither the server's, nor an alias, nor the model as servers.yaml has it.
        """
        ours = (None, *self.names, self.model_name, self.server.model)
        if name not in ours:
            raise errors.model_not_found(str(name), self.names)

    def heading(self, prefix: str) -> dict[str, object]:
        """Return what every document of one answer begins with; *prefix* starts its id."""
        return {
            "id": f"{prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": self.spec.name,
            "system_fingerprint": f"tqd-{self.spec_hash}",
        }

    def load(self, loaded: LoadedEngine) -> None:
        """Take requests from now on."""
        prompts = Prompts(loaded.tokenizer)
        self._model = Model(loaded, prompts, Vocabulary(loaded.tokenizer))
        self._apply_limits()
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def apply(self, live: Live) -> None:
        """Take over settings that need no restart."""
        self.server = live.server
        self.api_key = live.api_key
        self.spec_hash = live.spec_hash
        self.memory_limit_bytes = live.memory_limit_bytes
        self._apply_limits()

    @contextmanager
    def request(self, request_id: str, progress: Progress) -> Iterator[Model]:
        """Keep one request as open, so that a drain waits for it.

        Raises:
            ApiError: the worker takes no requests now.
        """
        model = self.model
        self._open[id(progress)] = request_id, progress  # two clients may choose the same id
        self._idle.clear()
        try:
            yield model
        finally:
            del self._open[id(progress)]
            if not self._open:
                self._idle.set()

    @property
    def ending(self) -> bool:
        """Whether this worker takes no requests any more."""
        return self.phase in (Phase.DRAINING, Phase.FAILED)

    async def wait_idle(self) -> None:
        """Return once no request is open."""
        await self._idle.wait()

    def interrupt(self) -> None:
        """Make the open requests fail: the worker can wait no longer."""
        if not self.interrupted.done():
            self.interrupted.set_result(None)

    def close(self) -> None:
        """Let the prompt thread go."""
        if self._model is not None:
            self._model.prompts.close()

    @property
    def stalled(self) -> bool:
        """Whether the engine's loop has not moved for longer than the probe allows."""
        return time.monotonic() - self._moved_at > self.server.probe.stall

    def snapshot(self) -> Snapshot:
        """Return the numbers of this moment; called once a second, and for each scrape."""
        stats = self.stats()
        now = time.monotonic()
        if stats.generation != self._generation:
            self._generation, self._moved_at = stats.generation, now
        prompt_tps, decode_tps = self._rates.sample(
            now, stats.prompt_tokens_total, stats.generation_tokens_total
        )
        ttft_s = self.metrics.ttft_quantiles(now, (0.5, 0.95)) or (None, None)
        return Snapshot(
            generation=stats.generation,
            running=stats.running,
            waiting=stats.waiting,
            requests_total=self.counters.requests,
            errors_total=self.counters.errors,
            rejected_total=self.counters.rejected,
            cancelled_total=self.counters.cancelled,
            prompt_tokens_total=stats.prompt_tokens_total,
            generation_tokens_total=stats.generation_tokens_total,
            prompt_tps=prompt_tps,
            decode_tps=decode_tps,
            kv_bytes=stats.kv_bytes,
            kv_tokens=stats.kv_tokens,
            mlx_active_bytes=stats.mlx_active_bytes,
            mlx_cache_bytes=stats.mlx_cache_bytes,
            mlx_peak_bytes=stats.mlx_peak_bytes,
            kv_reserved_bytes=stats.kv_reserved_bytes,
            kv_limit_bytes=stats.kv_limit_bytes,
            memory_promised_bytes=self._promised_bytes(stats),
            open=tuple(self._open_requests(now)),
            kv_packing_s=stats.packing_s,
            passed_at=stats.passed_at,
            ttft_p50_s=ttft_s[0],
            ttft_p95_s=ttft_s[1],
            requests=self.metrics.read(stats.queue_time_s),
        )

    def _open_requests(self, now: float) -> Iterator[OpenRequest]:
        for request_id, progress in islice(self._open.values(), MOST_OPEN):
            yield OpenRequest(
                id=request_id,
                age_s=round(now - progress.started, 3),
                stream=progress.stream,
                prompt_tokens=progress.prompt_tokens,
                completion_tokens=progress.completion_tokens,
            )

    def _promised_bytes(self, stats: EngineStats) -> int:
        """Return the most memory that this worker may come to use for what runs, or may start to run."""
        if self._model is None:
            return self.memory_limit_bytes or 0
        fixed = self._model.loaded.model.weights_bytes + self.spec.memory_reserve_bytes
        # the limit that the engine goes by: a lower one may still be on its way to it
        caches = max(stats.kv_limit_bytes or 0, stats.kv_reserved_bytes)
        return max(self.memory_limit_bytes or 0, fixed + caches)

    def state(self) -> Mapping[str, object]:
        """Return who this worker is and whether it moves, for readiness."""
        return {
            "status": "stalled" if self.phase is Phase.READY and self.stalled else self.phase.value,
            "server": self.spec.name,
            "nonce": self.spec.nonce,
            "spec_hash": self.spec_hash,
            "generation": self.stats().generation,
        }

    def _apply_limits(self) -> None:
        if self._model is not None:
            loaded = self._model.loaded
            loaded.engine.set_limits(
                max_concurrent=self.server.max_concurrent,
                queue=self.server.queue,
                kv_limit_bytes=kv_limit(
                    self.server,
                    share_bytes=self.memory_limit_bytes,
                    reserve_bytes=self.spec.memory_reserve_bytes,
                    weights_bytes=loaded.model.weights_bytes,
                ),
                memory_limit_bytes=self.memory_limit_bytes,
            )
