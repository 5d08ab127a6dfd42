"""From log-probabilities to the next token, with a random key of each request's own.

A seed must give the same tokens whatever else is in the batch, so nothing here touches MLX's global
random state: each request splits its own key at every token.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from daemon.worker.requests import Sampling

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

_SEED_MASK = 2**64 - 1


def make_sampler(sampling: Sampling) -> Sampler:
    """Return a function from log-probabilities (1, vocab) to tokens (1,).

    Every greedy request gets the same function: mlx-lm then samples the whole batch in one call.
    """
    if sampling.temperature == 0:
        greedy: Sampler = greedy_sampler
        return greedy
    return _KeyedSampler(sampling)


class _KeyedSampler:
    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & _SEED_MASK
        self._key = mx.random.key(seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._key, now = mx.random.split(self._key)
        logits = logprobs.astype(mx.float32) / self._sampling.temperature
        return mx.random.categorical(restrict(logits, self._sampling), key=now)


def restrict(logits: mx.array, sampling: Sampling) -> mx.array:
    """Return *logits* (…, vocab) with −inf for the tokens that top_k, top_p and min_p rule out, in that order."""
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        kth = mx.min(mx.topk(logits, sampling.top_k, axis=-1), axis=-1, keepdims=True)
        logits = mx.where(logits < kth, -mx.inf, logits)
    if sampling.top_p < 1:
        probabilities = mx.softmax(logits, axis=-1, precise=True)
        descending = -mx.sort(-probabilities, axis=-1)
        # a token stays while the likelier ones have not reached top_p together: the best one always stays
        stays = mx.cumsum(descending, axis=-1) - descending < sampling.top_p
        least = mx.min(mx.where(stays, descending, 2.0), axis=-1, keepdims=True)
        logits = mx.where(probabilities < least, -mx.inf, logits)
    if sampling.min_p > 0:
        probabilities = mx.softmax(logits, axis=-1, precise=True)
        best = mx.max(probabilities, axis=-1, keepdims=True)
        logits = mx.where(probabilities < sampling.min_p * best, -mx.inf, logits)
    return logits


def make_logits_processors(sampling: Sampling, prompt_tokens: int) -> list[LogitsProcessor]:
    """Return the functions that change logits (1, vocab) before sampling, given all tokens so far.

    repetition_penalty counts prompt and output, as in Hugging Face's; presence and frequency penalties
    count the output only, as in OpenAI's API.
    """
    processors: list[LogitsProcessor] = []
    if sampling.logit_bias:
        ids = mx.array([token for token, _ in sampling.logit_bias])
        values = mx.array([bias for _, bias in sampling.logit_bias])
        processors.append(lambda _, logits: logits.at[:, ids].add(values.astype(logits.dtype)))
    if sampling.repetition_penalty != 1:
        processors.append(_repetition_penalty(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        processors.append(
            _count_penalty(sampling.presence_penalty, sampling.frequency_penalty, prompt_tokens)
        )
    return processors


def _repetition_penalty(penalty: float) -> LogitsProcessor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        seen = logits[:, tokens]
        return _put(logits, tokens, mx.where(seen < 0, seen * penalty, seen / penalty))

    return process


def _put(logits: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    # a token that occurs twice gets the same value twice: assignment, not addition
    changed = mx.array(logits)
    changed[:, tokens] = values
    return changed


def _count_penalty(presence: float, frequency: float, prompt_tokens: int) -> LogitsProcessor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        output = tokens[prompt_tokens:]
        if output.size == 0:
            return logits
        counts = mx.zeros((logits.shape[-1],)).at[output].add(1.0)
        penalty = frequency * counts + presence * (counts > 0)
        return logits - penalty.astype(logits.dtype)

    return process
