"""What a policy costs through the scheduler that serves: prompts and decoding apart, one sequence alone and several at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from daemon.cache.build import CacheFactory
from daemon.config.evaluation import Served
from daemon.policy.rules import Batching
from daemon.worker.admission import Costs
from daemon.worker.requests import GenerationRequest, Sampling
from daemon.worker.scheduler import Scheduler

PROMPTS = (512, 448, 320, 192)  # tokens; of different lengths, as requests are
TOKENS = 33  # that each generates: the first ends the prompt, the others are a fold


@dataclass(frozen=True)
class _Loaded:
    """The model as the scheduler needs it; memory is no matter here."""

    model: Any
    factory: CacheFactory
    batching: Batching
    eos_token_ids: frozenset[int] = frozenset()
    costs: Costs = field(
        default_factory=lambda: Costs(lambda _: 0, padded=False, reading_tokens=sum(PROMPTS))
    )


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    submitted_at: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)


def serve(model: Any, factory: CacheFactory, batching: Batching, text: Sequence[int]) -> Served:
    """Generate after prompts cut from *text*, each alone and then all at once, greedily."""
    prompts = [tuple(text[:length]) for length in PROMPTS]
    with _making(model, factory):
        return _served(_Loaded(model, factory, batching), prompts)


@contextmanager
def _making(model: Any, factory: CacheFactory) -> Iterator[None]:
    """Let *model* make its caches by *factory* for a while."""
    before = vars(model).get("make_cache")
    model.make_cache = factory
    try:
        yield
    finally:
        if before is None:
            del model.make_cache
        else:
            model.make_cache = before


def _served(loaded: _Loaded, prompts: Sequence[tuple[int, ...]]) -> Served:
    prompt_s = decode_s = 0.0
    alone = []
    for prompt in prompts:
        (sequence,), until_first_s, after_s = _generate(loaded, [prompt])
        alone.append(sequence.tokens)
        prompt_s, decode_s = prompt_s + until_first_s, decode_s + after_s
    together, _, batch_s = _generate(loaded, prompts)
    decoded = len(prompts) * (TOKENS - 1)
    return Served(
        sequences=len(prompts),
        prompt_tps=sum(map(len, prompts)) / prompt_s,
        decode_tps=decoded / decode_s,
        batch_decode_tps=decoded / batch_s,
        same_as_alone=sum(
            sequence.tokens == tokens for sequence, tokens in zip(together, alone, strict=True)
        ),
    )


def _generate(
    loaded: _Loaded, prompts: Sequence[tuple[int, ...]]
) -> tuple[list[_Sequence], float, float]:
    """Return the sequences, the seconds until each has its first token, and those from then on.

    A scheduler reads prompts and decodes in one step, so with several prompts the second figure is
    scaled up to all tokens after the first ones.
    """
    scheduler: Scheduler[_Sequence] = Scheduler(loaded, max_concurrent=len(prompts))
    greedy = Sampling(temperature=0.0)
    sequences = [
        _Sequence(GenerationRequest(prompt, TOKENS, greedy, ignore_eos=True)) for prompt in prompts
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    started = time.perf_counter()
    read: float | None = None
    early = 0
    while not scheduler.idle:
        for sequence, events in scheduler.step().items():
            sequence.tokens += [event.token for event in events]
        if read is None and all(sequence.tokens for sequence in sequences):
            read = time.perf_counter()
            early = sum(len(sequence.tokens) - 1 for sequence in sequences)
    assert read is not None
    total = len(sequences) * (TOKENS - 1)
    after_s = (time.perf_counter() - read) * total / (total - early)
    return sequences, read - started, after_s
