from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from daemon.cache.row import Row
from daemon.measure.divergence import MakeRow, exact
from daemon.measure.footprint import footprint
from daemon.policy.schemes import parse_scheme

HEADS, DIM = 2, 64


def filled(cache: Any) -> Any:
    cache.update_and_fetch(mx.zeros((1, HEADS, 48, DIM)), mx.zeros((1, HEADS, 48, DIM)))
    return cache


def packed(scheme: str) -> MakeRow:
    return lambda _: Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=32)


@pytest.mark.parametrize(
    "scheme",
    ["int8", "turbo8v4", "turbo4v3", "turbo3v3", "turbo0v4", "turbo5v3.5", "turbo3tv3t", "affine4"],
)
def test_bits_are_those_that_the_catalogue_states(scheme: str) -> None:
    got = footprint([filled(KVCache())], packed(scheme), (4096,))
    stated = parse_scheme(scheme).bits_per_value(DIM, DIM)
    assert got.bits_per_value == pytest.approx(stated)
    assert got.bytes_per_token == pytest.approx(stated / 8 * HEADS * 2 * DIM)
    assert got.bytes_per_token_fp16 == HEADS * 2 * DIM * 2


@pytest.mark.parametrize(("sinks", "tail", "fold"), [(4, 256, 128), (0, 32, 96), (700, 0, 32)])
def test_bits_do_not_depend_on_sinks_tail_and_fold(sinks: int, tail: int, fold: int) -> None:
    def make_row(_: int) -> Row:
        return Row(parse_scheme("turbo8v4"), sink_tokens=sinks, tail_tokens=tail, fold_tokens=fold)

    got = footprint([filled(KVCache())], make_row, (4096,))
    assert got.bits_per_value == pytest.approx(parse_scheme("turbo8v4").bits_per_value(DIM, DIM))


def test_the_models_own_precision_counts_as_16_bits() -> None:
    """A model computes in 32 bits on a CPU; nobody serves it like that elsewhere."""
    got = footprint([filled(KVCache())], exact, (100, 200))
    assert got.bits_per_value == 16
    assert got.context_bytes == got.context_bytes_fp16 == (51_200, 102_400)


def test_allocated_bytes_cover_the_used_ones_and_sinks_and_tail() -> None:
    got = footprint([filled(KVCache())], packed("turbo4v4"), (1024, 8192))
    cold = [length * got.bytes_per_token for length in (1024, 8192)]
    for allocated, used in zip(got.context_bytes, cold, strict=True):
        assert used < allocated < 1.5 * used + 64 * got.bytes_per_token_fp16


def test_windows_and_states_do_not_grow() -> None:
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 100), dtype=mx.float16)
    caches = [filled(RotatingKVCache(max_size=64)), state, CacheList(filled(KVCache()), state)]
    got = footprint(caches, exact, (1000, 2000))
    token = HEADS * 2 * DIM * 2
    assert got.bytes_per_token == token
    assert got.context_bytes == (64 * token + 400 + 1000 * token, 64 * token + 400 + 2000 * token)


def test_a_layer_with_a_token_budget_does_not_grow_past_it() -> None:
    row = Row(parse_scheme("turbo8v4"), sink_tokens=4, tail_tokens=32, token_budget=256)
    got = footprint([filled(KVCache())], lambda _: row.fresh(), (1024, 16384))
    assert got.bytes_per_token == 0
    assert got.context_bytes[0] == pytest.approx(got.context_bytes[1], rel=0.3)
    assert got.context_bytes_fp16[1] == 16 * got.context_bytes_fp16[0]
