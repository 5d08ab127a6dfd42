"""How far a quantized KV cache moves a model's next-token distribution, at decode time.

Protocol: each window of text is prefilled exactly once with mlx-lm's own caches; copies of them are then
packed, and the following tokens are decoded with the true text as input (teacher forcing). Every attended
key and value, the decoded tokens' own included, is what the scheme stores for it at that moment. Up to
8 tokens are decoded at once where that gives the same as one by one: tokens enter a tile 32 at a time, so
within an eighth of a tile nothing is packed. The divergence at a position is KL(reference ‖ quantized) over the full vocabulary, in nats; the reference
decodes the same tokens over mlx-lm's own caches. Layers that a policy does not pack (sliding windows,
recurrent states) keep mlx-lm's own in both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import CacheList, make_prompt_cache

from daemon.cache.build import parts
from daemon.measure.texts import Passage

PREFILL_CHUNK = 512
BLOCK = 8  # tokens decoded at once; divides a tile, and is what decode attention takes at most

Floats = npt.NDArray[np.float32]
PerPosition = npt.NDArray[np.float64]
Pack = Callable[[Sequence[Any]], list[Any]]
"""Gives copies of mlx-lm's own caches of one sequence, packed where a policy says so."""


@dataclass(frozen=True)
class Window:
    """A prefilled window: mlx-lm's own caches of its prompt, and the tokens to score."""

    caches: tuple[Any, ...]
    offset: int  # tokens in the caches
    tokens: tuple[int, ...]  # the last prompt token, then the text to be predicted


@dataclass(frozen=True, slots=True)
class Scores:
    """What was found at each scored position, arrays of shape (windows, positions).

    *kl* in nats; *agreed*: the most likely token is the same; the surprises are −log p of the true token.
    """

    kl: PerPosition
    agreed: npt.NDArray[np.bool_]
    reference_surprise: PerPosition
    surprise: PerPosition


@dataclass(frozen=True, slots=True)
class Divergence:
    """Figures over all scored positions; nats where it is a divergence."""

    positions: int
    mean: float
    standard_error: float | None  # of the mean, over windows; one window has none
    median: float
    p999: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float

    @property
    def perplexity_delta(self) -> float:
        """The relative change of perplexity: 0.01 is 1 % more."""
        return self.perplexity / self.reference_perplexity - 1


def exact(caches: Sequence[Any]) -> list[Any]:
    """Return copies of *caches*, packed nowhere: the reference."""
    return [copy.deepcopy(cache) for cache in caches]


def prefill(model: Any, passage: Passage) -> Window:
    """Read the prompt of *passage*, less its last token, exactly."""
    offset = passage.prompt - 1
    return Window(prefill_all(model, passage.tokens[:offset]), offset, passage.tokens[offset:])


def prefill_all(model: Any, tokens: Sequence[int]) -> tuple[Any, ...]:
    """Return mlx-lm's own caches of *model* after it read *tokens*."""
    caches = make_prompt_cache(model)
    feed(model, tokens, caches)
    return tuple(caches)


def feed(model: Any, tokens: Sequence[int], caches: Sequence[Any]) -> None:
    """Let *model* read *tokens* into *caches*, one chunk after the other."""
    for start in range(0, len(tokens), PREFILL_CHUNK):
        model(mx.array([list(tokens[start : start + PREFILL_CHUNK])]), cache=list(caches))
        mx.eval([cache.state for cache in caches])


def decode(model: Any, windows: Sequence[Window], pack: Pack, *, together: bool = True) -> Floats:
    """Decode the scored tokens of all *windows* over caches that *pack* gives.

    They are rows of one batch if the model can run several *together* and their caches can be merged.

    Returns:
        log-probabilities, float32 of shape (windows, scored tokens, vocab).
    """
    rows = [pack(window.caches) for window in windows]
    # without a tail a token is packed as soon as the next one comes; a budget counts single tokens
    packed = [row for cache in parts(rows[0]) for row in getattr(cache, "rows", ())]
    block = BLOCK if all(row.tail_tokens and row.token_budget is None for row in packed) else 1
    if not together or len(rows) == 1 or not all(map(_mergeable, rows[0])):
        apart = [
            _decode(model, [window], caches, block)
            for window, caches in zip(windows, rows, strict=True)
        ]
        return np.concatenate(apart)
    batch = [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]
    return _decode(model, windows, batch, block)


def _mergeable(cache: Any) -> bool:
    if isinstance(cache, CacheList):
        return all(map(_mergeable, cache.caches))
    return hasattr(cache, "merge")


def _decode(model: Any, windows: Sequence[Window], caches: list[Any], block: int) -> Floats:
    inputs = mx.array([list(window.tokens) for window in windows])
    end = inputs.shape[1] - 1
    parts, start = [], 0
    while start < end:
        stop = min(end, start + block - (windows[0].offset + start) % block)
        logits = model(inputs[:, start:stop], cache=caches).astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs)
        parts.append(np.array(logprobs))
        start = stop
    return np.concatenate(parts, axis=1)


def compare(reference: Floats, quantized: Floats, targets: Sequence[Sequence[int]]) -> Scores:
    """Compare two results of decode; *targets* are the true tokens of each window."""
    # one window at a time: a whole vocabulary in float64 is large
    parts = [
        _compare(ref.astype(np.float64), got.astype(np.float64), np.array(true))
        for ref, got, true in zip(reference, quantized, targets, strict=True)
    ]
    return join(parts)


def _compare(ref: PerPosition, got: PerPosition, true: npt.NDArray[np.int64]) -> Scores:
    at = np.arange(len(true))
    return Scores(
        kl=(np.exp(ref) * (ref - got)).sum(axis=-1)[None],
        agreed=(ref.argmax(axis=-1) == got.argmax(axis=-1))[None],
        reference_surprise=-ref[at, true][None],
        surprise=-got[at, true][None],
    )


def join(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all windows of *parts*."""
    return Scores(
        kl=np.concatenate([part.kl for part in parts]),
        agreed=np.concatenate([part.agreed for part in parts]),
        reference_surprise=np.concatenate([part.reference_surprise for part in parts]),
        surprise=np.concatenate([part.surprise for part in parts]),
    )


def summarize(scores: Scores) -> Divergence:
    """Return the figures over all positions of *scores*."""
    means = scores.kl.mean(axis=1)
    return Divergence(
        positions=scores.kl.size,
        mean=float(scores.kl.mean()),
        standard_error=float(np.std(means, ddof=1) / len(means) ** 0.5) if len(means) > 1 else None,
        median=float(np.median(scores.kl)),
        p999=float(np.quantile(scores.kl, 0.999)),
        top1_agreement=float(scores.agreed.mean()),
        perplexity=float(np.exp(scores.surprise.mean())),
        reference_perplexity=float(np.exp(scores.reference_surprise.mean())),
    )
