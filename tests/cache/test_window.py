from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.cache import window
from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.policy.schemes import parse_scheme

HEADS, DIM = 2, 32


def keys_of(count: int, seed: int = 0) -> mx.array:
    return mx.random.normal((HEADS, count, DIM), key=mx.random.key(seed))


def budgeted(scheme: str, budget: int | None = 128, *, sinks: int = 4, tail: int = 32) -> Row:
    return Row(parse_scheme(scheme), sink_tokens=sinks, tail_tokens=tail, token_budget=budget)


def attended(position: int, budget: int, sinks: int) -> list[int]:
    """The promise, written out: the sinks, and the newest tokens that make up the budget with them, by whole tiles."""
    gone = window.dropped_at(position, budget)
    return [p for p in range(position + 1) if p < sinks or p >= sinks + gone]


@given(position=st.integers(0, 5000), tiles=st.integers(4, 40), sinks=st.integers(0, 40))
def test_between_a_budget_less_a_tile_and_the_budget_is_attended_to(
    position: int, tiles: int, sinks: int
) -> None:
    budget = 32 * tiles

    count = len(attended(position, budget, min(sinks, budget - 96)))

    assert count == position + 1 if position < budget else budget - 32 < count <= budget


@given(cuts=st.lists(st.integers(1, 150), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_folds_stay_at_their_positions_when_older_tokens_leave(cuts: list[int]) -> None:
    """What is in full precision depends on the length alone, whether tokens are dropped or not."""
    rows = [
        Row(
            parse_scheme("int8"),
            sink_tokens=4,
            tail_tokens=64,
            fold_tokens=96,
            token_budget=budget,
        )
        for budget in (None, 256)
    ]
    for row in rows:
        for count in cuts:
            row.append(keys_of(count), keys_of(count))
        row.pack()

    whole, short = rows
    assert whole.packed_tokens == short.packed_tokens
    assert short.length - short.dropped <= 256 + cuts[-1]


@given(
    cuts=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    queries=st.integers(1, 20),
    sinks=st.sampled_from([0, 4, 40]),
    tail=st.sampled_from([0, 32, 64]),
    scheme=st.sampled_from(["fp16", "turbo0v8", "int8"]),
    batched=st.booleans(),
)
@settings(max_examples=60)
def test_however_tokens_arrive_each_attends_to_sinks_and_newest(
    cuts: list[int], queries: int, sinks: int, tail: int, scheme: str, batched: bool
) -> None:
    budget = 192
    row = budgeted(scheme, budget, sinks=sinks, tail=tail)
    total = sum(cuts) + queries
    keys = keys_of(total)
    cache = BatchCache([row]) if batched else SequenceCache(row)
    at = 0
    for count in [*cuts, queries]:
        cache.update_and_fetch(keys[None, :, at : at + count], keys[None, :, at : at + count])
        at += count
    q = keys_of(queries, seed=5)

    got = cache.attend(q[None], DIM**-0.5, "causal" if queries > 1 else None, None)[0]

    for i in range(queries):
        index = mx.array(attended(total - queries + i, budget, sinks))
        expected = mx.fast.scaled_dot_product_attention(
            q[None, :, i : i + 1], keys[None, :, index], keys[None, :, index], scale=DIM**-0.5
        )
        # two decimal digits of 8-bit vectors survive; full precision is exact but for the order of sums
        assert mx.allclose(got[:, i : i + 1], expected[0], atol=1e-4 if scheme == "fp16" else 0.03)


@pytest.mark.parametrize("scheme", ["fp16", "turbo0v4", "turbo8v4"])
def test_memory_stops_growing_at_the_budget(scheme: str) -> None:
    """The bytes of a long sequence are those of one that is as long as the budget, plus spare capacity."""
    long, full = budgeted(scheme), budgeted(scheme, None)
    for step in range(40):
        keys = keys_of(20, seed=step)
        long.append(keys, keys)
        if step < 8:
            full.append(keys, keys)
    mx.eval(long.arrays)

    assert (long.length, long.dropped) == (800, 672)  # 128 tokens are kept
    assert long.used_bytes < full.used_bytes
    assert long.nbytes <= full.nbytes


@pytest.mark.parametrize("scheme", ["fp16", "turbo0v4", "turbo8v4"])
def test_trim_works_until_it_needs_dropped_tokens(scheme: str) -> None:
    row, alone = budgeted(scheme), budgeted(scheme)
    keys = keys_of(140)
    for at in range(140):
        row.append(keys[:, at : at + 1], keys[:, at : at + 1])
        if at < 130:
            alone.append(keys[:, at : at + 1], keys[:, at : at + 1])
    assert row.dropped == 32

    with pytest.raises(ValueError, match=r"cannot trim 13 of 140 tokens: .* a token budget of 128"):
        row.trim(13)
    assert row.length == 140
    assert not SequenceCache(row).is_trimmable()
    assert row.trim(10) == 10

    q = keys_of(1, seed=3)
    for cache in (row, alone):
        cache.append(q, q)
    got, expected = (SequenceCache(r).attend(q[None], 1.0, None, None) for r in (row, alone))
    assert mx.allclose(got, expected, atol=1e-5 if scheme == "fp16" else 0.1)


def test_a_batch_that_cannot_trim_one_row_trims_none() -> None:
    short, long = budgeted("turbo8v4"), budgeted("turbo8v4")
    for row, count in ((short, 50), (long, 160)):
        for at in range(0, count, 10):
            keys = keys_of(10, seed=at)
            row.append(keys, keys)
    batch = BatchCache([short, long])

    with pytest.raises(ValueError, match="cannot trim"):
        batch.trim(40)

    assert not batch.is_trimmable()
    assert batch.offset.tolist() == [50, 160]


def test_a_row_under_its_budget_is_trimmable() -> None:
    row = budgeted("turbo8v4")
    keys = keys_of(128)
    row.append(keys, keys)

    assert SequenceCache(row).is_trimmable()
    assert row.trim(100) == 100


@pytest.mark.parametrize("additive", [False, True])
def test_a_models_own_mask_is_cut_to_what_is_kept(additive: bool) -> None:
    """Masks are as wide as the tokens seen so far: layers with and without a budget share one."""
    row = budgeted("fp16")
    keys = keys_of(300)
    cache = SequenceCache(row)
    for at in range(0, 296, 8):
        cache.update_and_fetch(keys[None, :, at : at + 8], keys[None, :, at : at + 8])
    offset = cache.offset
    cache.update_and_fetch(keys[None, :, 296:], keys[None, :, 296:])
    mask = (
        mx.arange(300)[None] == mx.array([2, 250, 297, 298])[:, None]
    )  # each query sees one token
    q = keys_of(4, seed=1)[None]

    got = cache.attend(q, 1.0, mx.where(mask, 0.0, -mx.inf) if additive else mask, None)

    assert (offset, row.dropped) == (296, 192)
    assert mx.allclose(got[0], keys[:, mx.array([2, 250, 297, 298])], atol=1e-5)


@pytest.mark.parametrize("queries", [1, 12])
def test_key_means_are_given_back_at_the_positions_they_were_taken_off(queries: int) -> None:
    """The mean turns with the position; after a drop a token's place in the row is not its position."""
    rope = nn.RoPE(DIM, base=100.0)
    mean = mx.random.normal((HEADS, DIM), key=mx.random.key(8)) * 10
    turned = rope(mx.broadcast_to(mean[None, :, None], (1, HEADS, 400, DIM)))
    keys = turned + keys_of(400)[None] / 4
    values = keys_of(400, seed=1)[None]
    transform = KeyTransform(mx.ones((HEADS, DIM)), mean, Rotary(rope, DIM))
    row = Row(
        parse_scheme("turbo8v8"), sink_tokens=4, tail_tokens=32, token_budget=128, keys=transform
    )
    cache = SequenceCache(row)
    for at in range(0, 388, 4):
        cache.update_and_fetch(keys[:, :, at : at + 4], values[:, :, at : at + 4])
    cache.update_and_fetch(keys[:, :, 388 : 388 + queries], values[:, :, 388 : 388 + queries])
    q = keys_of(queries, seed=5)[None] / 4

    got = cache.attend(q, 1.0, "causal" if queries > 1 else None, None)

    index = mx.array(attended(388, 128, 4))
    expected = mx.fast.scaled_dot_product_attention(
        q[:, :, :1], keys[:, :, index], values[:, :, index], scale=1.0
    )
    assert row.dropped > 200
    assert mx.allclose(got[:, :, :1], expected, atol=0.03)


def test_positions_go_on_counting() -> None:
    cache = SequenceCache(budgeted("turbo8v4"))
    for step in range(30):
        keys = keys_of(10, seed=step)[None]
        views = cache.update_and_fetch(keys, keys)

    assert cache.offset == cache.size() == 300
    assert views[0].shape == (1, HEADS, 300, DIM)
    assert BatchCache([cache.row]).offset.tolist() == [300]


@pytest.mark.parametrize(("budget", "tail"), [(96, 32), (100, 32), (32, 0)])
def test_a_budget_that_sinks_and_tail_do_not_fit_in_is_refused(budget: int, tail: int) -> None:
    with pytest.raises(ValueError, match="a token budget"):
        budgeted("turbo8v4", budget, tail=tail)
