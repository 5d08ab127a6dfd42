"""Continuous batching: who waits, who runs, and which row of mlx-lm's BatchGenerator is whose.

Runs on the MLX thread. It knows requests and rows; threads, loops and clients are the engine's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from daemon.cache.build import CacheFactory
from daemon.metrics import catalogue
from daemon.metrics.histogram import Observations
from daemon.policy.claim import PREFILL_CHUNK, PREFILL_ROWS
from daemon.policy.rules import Batching
from daemon.worker.admission import Costs
from daemon.worker.packing_time import PackingTime, packed_layers
from daemon.worker.requests import GenerationRequest, TokenEvent
from daemon.worker.sampling import make_logits_processors, make_sampler


class Owner(Protocol):
    """Whoever asked for a sequence; compared by identity."""

    @property
    def request(self) -> GenerationRequest:
        """What was asked for."""
        ...

    @property
    def submitted_at(self) -> float:
        """When it was asked for, on the monotonic clock."""
        ...


OwnerT = TypeVar("OwnerT", bound=Owner)


class Schedulable(Protocol):
    """What the scheduler needs of a loaded model."""

    @property
    def model(self) -> Any:
        """The model; its `make_cache` is the factory."""
        ...

    @property
    def factory(self) -> CacheFactory:
        """What makes its caches."""
        ...

    @property
    def batching(self) -> Batching:
        """How several sequences may run together."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a sequence."""
        ...

    @property
    def costs(self) -> Costs:
        """What its sequences take."""
        ...


class Scheduler(Generic[OwnerT]):
    """mlx-lm's BatchGenerator, the line of requests before it, and who each of its rows belongs to."""

    def __init__(
        self, loaded: Schedulable, max_concurrent: int, kv_limit_bytes: int | None = None
    ) -> None:
        self.kv_limit_bytes = kv_limit_bytes
        """What all sequences together may grow to; None: no limit. Lowering it touches no running one."""
        self.waits_for_memory = False
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        packs = any(slot.packed and slot.row().packs for slot in loaded.factory.slots)
        self._packing = PackingTime() if packs else None
        self.queue_time_s = Observations(catalogue.REQUEST_S)
        self._line: deque[OwnerT] = deque()
        self._rows: dict[int, OwnerT] = {}
        self._prompt_done: dict[int, int] = {}  # tokens read of each prompt that is being read
        self._reading: dict[int, int] = {}  # tokens of each prompt that is not read to its end
        self._costs = loaded.costs
        self._batching = loaded.batching
        self._max_concurrent, prefill_rows = self._most_rows(max_concurrent)
        self._stops = StopSequences([[token] for token in sorted(loaded.eos_token_ids)])
        self._no_stops = StopSequences()
        device = mx.default_device()
        self._generator = BatchGenerator(
            loaded.model,
            completion_batch_size=self._max_concurrent,
            prefill_batch_size=prefill_rows,
            prefill_step_size=PREFILL_CHUNK["cpu" if device == mx.Device(mx.cpu) else "metal"],
            stream=mx.default_stream(device),
        )
        # it has just wired the recommended maximum of the whole machine for this one process: undo that
        self._generator.close()

    @property
    def packing_s(self) -> float | None:
        """Seconds that packing has taken, estimated; None where nothing is ever packed."""
        return None if self._packing is None else self._packing.seconds

    @property
    def running(self) -> int:
        """Sequences that are being read or generated."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._rows and not self._line

    def add(self, generation: OwnerT) -> None:
        """Put *generation* at the end of the line."""
        self._line.append(generation)

    def drop(self, generation: OwnerT) -> None:
        """Forget *generation*, wherever it is; its row and its memory are free at once."""
        if generation in self._line:
            self._line.remove(generation)
        uids = [uid for uid, owner in self._rows.items() if owner is generation]
        if uids:
            self._generator.remove(uids)
            for uid in uids:
                del self._rows[uid]
                self._prompt_done.pop(uid, None)
                self._reading.pop(uid, None)

    def set_max_concurrent(self, max_concurrent: int) -> None:
        """Change how many sequences run at once; running ones go on."""
        self._max_concurrent, prefill_rows = self._most_rows(max_concurrent)
        self._generator.completion_batch_size = self._max_concurrent
        self._generator.prefill_batch_size = prefill_rows

    def _most_rows(self, max_concurrent: int) -> tuple[int, int]:
        """Return how many sequences may decode, and how many prompts may be read, together."""
        rows = 1 if self._batching == "alone" else max_concurrent
        return rows, min(PREFILL_ROWS, rows) if self._batching == "rows" else 1

    def step(self) -> dict[OwnerT, list[TokenEvent]]:
        """Admit what fits, run one decode step and one prefill chunk, and return the new tokens by sequence."""
        places = True
        while self._line and (places := len(self._rows) < self._max_concurrent):
            if not self._has_room(self._line[0].request):
                break
            self._insert(self._line.popleft())
        self.waits_for_memory = bool(self._line) and places
        if not self._rows:
            return {}
        progress, responses = self._next()
        self._count_prompt_tokens(progress)
        delivery: dict[OwnerT, list[TokenEvent]] = {}
        for response in responses:
            generation = self._rows[response.uid]
            delivery.setdefault(generation, []).append(_event(generation.request, response))
            if response.finish_reason is not None:
                del self._rows[response.uid]
                self._reading.pop(response.uid, None)
        self.generation_tokens_total += len(responses)
        return delivery

    def _next(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the generator's next step, and count the time that packing takes."""
        if self._packing is None:
            step: tuple[Sequence[Any], Sequence[Any]] = self._generator.next()
            return step
        decoding = packed_layers(self._generator._generation_batch.prompt_cache)
        reading = packed_layers(self._generator._prompt_batch.prompt_cache)
        # a prompt that is kept exact is not due before it is decoded
        early = [cache for cache in reading if not cache.rows[0].exact_prompt]
        layers = zip_longest(decoding, early)
        self._packing.sample([[cache for cache in layer if cache is not None] for layer in layers])
        before = self._packed_tokens()
        step = self._generator.next()
        after = self._packed_tokens()
        self._packing.count(sum(count - before.get(uid, 0) for uid, count in after.items()))
        return step

    def _packed_tokens(self) -> dict[int, int]:
        """Return how many tokens of each row are packed, as its first packed layer has it."""
        found: dict[int, int] = {}
        for batch in (self._generator._prompt_batch, self._generator._generation_batch):
            for layer in packed_layers(batch.prompt_cache)[:1]:
                found |= {
                    uid: row.packed_tokens for uid, row in zip(batch.uids, layer.rows, strict=False)
                }
        return found

    def _count_prompt_tokens(self, progress: Sequence[Any]) -> None:
        """Count prompt tokens as they are read, so that an aborted prompt counts only as far as it came."""
        for report in progress:
            done = report.progress[0]
            self.prompt_tokens_total += done - self._prompt_done.get(report.uid, 0)
            self._prompt_done[report.uid] = done
            if report.end_of_prompt:
                del self._prompt_done[report.uid]
                self._reading.pop(report.uid, None)

    @property
    def reserved_bytes(self) -> int:
        """What the sequences that run may grow to."""
        return self._costs.total_bytes(_length(it.request) for it in self._rows.values())

    def _has_room(self, request: GenerationRequest) -> bool:
        """Whether *request* may run beside what runs. Alone it always may: its size was judged when it came."""
        if not self._rows:
            return True
        if not self._costs.can_read([*self._reading.values(), len(request.prompt)]):
            return False
        if self.kv_limit_bytes is None:
            return True
        lengths = [*(_length(it.request) for it in self._rows.values()), _length(request)]
        return self._costs.total_bytes(lengths) <= self.kv_limit_bytes

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

    def _insert(self, generation: OwnerT) -> None:
        request = generation.request
        self.queue_time_s.observe(time.monotonic() - generation.submitted_at)
        (uid,) = self._generator.insert(
            [list(request.prompt)],
            max_tokens=[request.max_tokens],
            samplers=[make_sampler(request.sampling)],
            logits_processors=[make_logits_processors(request.sampling, len(request.prompt))],
            stop_sequences=[self._no_stops if request.ignore_eos else self._stops],
        )
        self._rows[uid] = generation
        self._reading[uid] = len(request.prompt)


def _length(request: GenerationRequest) -> int:
    """Return the most tokens that the sequence of *request* comes to hold."""
    return len(request.prompt) + request.max_tokens


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
