"""What people report about quantized caches elsewhere, where no other test has a report of its kind (tests/complaints.md)."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.policy.schemes import parse_scheme
from tests.tiny_llama import tiny_llama

SCHEMES = ("int8", "turbo8v4", "turbo4v4", "turbo3.5v3.5", "turbo2v2", "affine4")
CHUNK = 64
TEXT = [(7 * i * i + 3 * i) % 997 for i in range(3 * CHUNK)]
QUESTION = [(11 * i + 5) % 997 for i in range(20)]


def answer(model: Any, prompt: list[int], caches: list[Any], count: int = 12) -> list[int]:
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=caches, prefill_step_size=CHUNK
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_prompt_that_continues_a_cached_one_is_answered_as_one_read_at_once(
    scheme: str, tiny_llama: Any, make_caches: Any
) -> None:
    """At a hit of a prompt cache nothing may be lost that a miss keeps: text is packed at the same moments."""
    expected = answer(tiny_llama, TEXT + QUESTION, make_caches(scheme))
    cached = make_caches(scheme)
    for start in range(0, len(TEXT), CHUNK):
        tiny_llama(mx.array([TEXT[start : start + CHUNK]]), cache=cached)

    for _ in range(2):  # the cached text serves again and again
        assert answer(tiny_llama, QUESTION, copy.deepcopy(cached)) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_and_packed_caches_give_sound_answers_together(
    scheme: str, bits: int
) -> None:
    """Elsewhere few-bit weights with few-bit caches collapsed into one token for ever."""
    model = tiny_llama(7)
    nn.quantize(model, group_size=32, bits=bits)
    caches = [
        SequenceCache(Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=32))
        for _ in model.layers
    ]

    model(mx.array([TEXT]), cache=caches)
    logits = model(mx.array([QUESTION]), cache=caches)[0]

    assert mx.all(mx.isfinite(logits)).item()
    assert len(set(mx.argmax(logits, axis=-1).tolist())) > len(QUESTION) // 2


@pytest.mark.parametrize("scheme", ["int8", "turbo4v4"])
def test_a_long_history_with_an_outlier_channel_is_as_exact_as_a_short_one(scheme: str) -> None:
    """Elsewhere a transform in half precision turned answers into noise after some 1,800 tokens."""

    def error(length: int) -> float:
        shape, random = (1, 2, length, 64), mx.random.split(mx.random.key(length), 3)
        outlier = mx.where(mx.arange(64) == 9, 300.0, 1.0)
        keys, values = (mx.random.normal(shape, key=key) for key in random[:2])
        cache = SequenceCache(Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=32))
        for start in range(0, length, 512):
            part = slice(start, start + 512)
            cache.update_and_fetch(
                (keys * outlier)[:, :, part].astype(mx.float16), values[:, :, part]
            )
        cache.row.pack()
        query = mx.random.normal((1, 4, 1, 64), key=random[2])
        got = cache.attend(query, 1 / 300, None, None)
        exact = mx.fast.scaled_dot_product_attention(query, keys * outlier, values, scale=1 / 300)
        return float(mx.linalg.norm(got - exact).item() / mx.linalg.norm(exact).item())

    assert error(4608) < 2 * error(200)
