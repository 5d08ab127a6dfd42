"""How far a quantized KV cache moves a model's next-token distribution, at decode time.

Protocol: each window of text is prefilled exactly once with mlx-lm's own cache; the cache is then
packed, and the following tokens are decoded one by one with the true text as input (teacher forcing).
Every attended key and value, the decoded tokens' own included, is what the scheme stores. The
divergence at a position is KL(reference ‖ quantized) over the full vocabulary, in nats; the reference
decodes the same tokens over the same cache unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from daemon.cache.build import convert
from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache

PREFILL_CHUNK = 512

Floats = npt.NDArray[np.float64]
MakeRow = Callable[[int], Row]


@dataclass(frozen=True)
class Window:
    """A prefilled window: the exact caches of its prompt, and the tokens to score."""

    caches: tuple[KVCache, ...]
    tokens: tuple[int, ...]  # the last prompt token, then the text to be predicted


@dataclass(frozen=True, slots=True)
class Divergence:
    """Figures over all scored positions; nats where it is a divergence."""

    positions: int
    mean: float
    median: float
    p999: float
    top1_agreement: float
    window_means: tuple[float, ...]

    @property
    def standard_error(self) -> float:
        """The standard error of the mean over windows."""
        return float(np.std(self.window_means, ddof=1) / len(self.window_means) ** 0.5)


def prefill(model: Any, tokens: Sequence[int], *, prompt: int, score: int) -> Window:
    """Prefill the first *prompt* − 1 of *tokens* exactly; the following *score* are to be scored.

    Raises:
        ValueError: there are too few tokens, or the model has caches other than plain growing ones.
    """
    if len(tokens) < prompt + score:
        raise ValueError(f"a window needs {prompt + score} tokens and has {len(tokens)}")
    caches = make_prompt_cache(model)
    if not all(type(cache) is KVCache for cache in caches):
        raise ValueError(
            "only models whose layers all keep a plain growing KV cache can be measured this way"
        )
    for start in range(0, prompt - 1, PREFILL_CHUNK):
        chunk = mx.array(list(tokens[start : min(start + PREFILL_CHUNK, prompt - 1)]))
        model(chunk[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    return Window(tuple(caches), tuple(tokens[prompt - 1 : prompt + score]))


def decode(model: Any, windows: Sequence[Window], make_row: MakeRow) -> Floats:
    """Decode the scored tokens of all *windows* as rows of one batch; *make_row* gives the row of a layer.

    Returns:
        log-probabilities, float64 of shape (windows, scored tokens, vocab).
    """
    converted = [convert(window.caches, make_row) for window in windows]
    batch = [SequenceCache.merge(layer) for layer in zip(*converted, strict=True)]
    tokens = mx.array([window.tokens for window in windows])
    steps = []
    for position in range(tokens.shape[1] - 1):
        logits = model(tokens[:, position : position + 1], cache=batch)[:, -1].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs)
        steps.append(np.array(logprobs))
    return np.stack(steps, axis=1).astype(np.float64)


def compare(reference: Floats, quantized: Floats) -> Divergence:
    """Return the divergence between two results of decode."""
    # one window at a time: a whole vocabulary in float64 is large
    kl = np.stack(
        [
            (np.exp(ref) * (ref - got)).sum(axis=-1)
            for ref, got in zip(reference, quantized, strict=True)
        ]
    )
    agreement = (reference.argmax(axis=-1) == quantized.argmax(axis=-1)).mean()
    return Divergence(
        positions=kl.size,
        mean=float(kl.mean()),
        median=float(np.median(kl)),
        p999=float(np.quantile(kl, 0.999)),
        top1_agreement=float(agreement),
        window_means=tuple(float(mean) for mean in kl.mean(axis=1)),
    )
