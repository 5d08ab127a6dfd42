"""The contract of mlx-lm's latent attention modules: what is a view, what is an array, and of what shape."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest

from daemon.cache.latent import BatchLatentCache, LatentCache
from daemon.cache.row import Row
from daemon.cache.sequence import View
from daemon.policy.schemes import FP16, INT8, Scheme

LATENT, ROTARY, HEADS = 32, 8, 3


def cache() -> LatentCache:
    return LatentCache(Row(Scheme(INT8, FP16), sink_tokens=4, tail_tokens=32))


def pair(rows: int, tokens: int, seed: int = 1) -> tuple[mx.array, mx.array]:
    return (
        mx.random.normal((rows, 1, tokens, LATENT), key=mx.random.key(seed)),
        mx.random.normal((rows, 1, tokens, ROTARY), key=mx.random.key(seed + 100)),
    )


def test_several_tokens_get_arrays_and_one_gets_a_view_of_the_latents() -> None:
    one = cache()
    latents, rotary = one.update_and_fetch(*pair(1, 80))
    assert isinstance(latents, mx.array)
    assert (latents.shape, rotary.shape) == ((1, 1, 80, LATENT), (1, 1, 80, ROTARY))

    latents, rotary = one.update_and_fetch(*pair(1, 1, seed=2))
    assert isinstance(latents, View)
    assert (latents.shape, rotary.shape) == ((1, 1, 81, LATENT), (1, 1, 81, ROTARY))


def test_rotary_keys_are_exact_and_old_latents_are_packed() -> None:
    one = cache()
    latents, rotary = pair(1, 200)
    one.update_and_fetch(latents, rotary)
    got, keys = one.update_and_fetch(*pair(1, 2, seed=2))

    assert mx.array_equal(keys[:, :, :200], rotary)
    assert not mx.array_equal(got[:, :, :200], latents)
    assert mx.allclose(got[:, :, :200], latents, atol=0.05)
    assert one.row.stored().packed_to == 160  # whole tiles, but for the tail of 32
    assert one.nbytes < 202 * (LATENT + ROTARY) * 4


@pytest.mark.parametrize("lengths", [(50, 20), (0, 40), (33, 33)])
@pytest.mark.parametrize("chunks", [(1, 1), (5, 5), (7, 3), (1, 6)])
def test_a_batch_is_a_rectangle_as_wide_as_its_mask(
    lengths: tuple[int, int], chunks: tuple[int, int]
) -> None:
    """Histories padded on the left, new tokens with their padding on the right: each row as if alone."""
    singles = [cache(), cache()]
    for seed, (one, length) in enumerate(zip(singles, lengths, strict=True)):
        if length:
            one.update_and_fetch(*pair(1, length, seed))
    batch = LatentCache.merge(copy.deepcopy(singles))
    assert isinstance(batch, BatchLatentCache)
    n = max(chunks)
    if chunks[0] != chunks[1]:
        batch.prepare(lengths=list(chunks), right_padding=[n - count for count in chunks])
    mask = batch.make_mask(n)
    assert isinstance(mask, mx.array)
    new = pair(2, n, seed=9)

    latents, rotary = batch.update_and_fetch(*new)

    width = max(lengths) + n
    assert mask.shape == (2, 1, n, width)
    assert (latents.shape[2], rotary.shape[2]) == (width, width)
    for index, one in enumerate(singles):
        chunk = [part[index : index + 1, :, : chunks[index]] for part in new]
        alone, keys = one.update_and_fetch(*chunk)
        start = max(lengths) - lengths[index]
        assert mx.array_equal(rotary[index, 0, start:][: keys.shape[2]], keys[0, 0])
        assert mx.all(mask[index, 0, -1, start:]).item()
        assert not mx.any(mask[index, 0, :, :start]).item()
        if isinstance(latents, mx.array) and isinstance(alone, mx.array):
            assert mx.array_equal(latents[index, 0, start:][: alone.shape[2]], alone[0, 0])


def test_a_ragged_row_attends_as_if_alone() -> None:
    singles = [cache(), cache()]
    for seed, (one, length) in enumerate(zip(singles, (120, 45), strict=True)):
        one.update_and_fetch(*pair(1, length, seed))
    batch = LatentCache.merge(copy.deepcopy(singles))
    new, queries = pair(2, 1, seed=9), mx.random.normal((2, HEADS, 1, LATENT), key=mx.random.key(5))
    latents, rotary = batch.update_and_fetch(*new)
    bias = mx.random.normal((2, HEADS, 1, rotary.shape[2]), key=mx.random.key(6))
    assert isinstance(latents, View)

    got = latents.cache.attend(queries, 0.3, bias, None)

    for index, one in enumerate(singles):
        one.update_and_fetch(*[part[index : index + 1] for part in new])
        own = bias[index : index + 1, ..., -one.offset :]
        expected = one.attend(queries[index : index + 1], 0.3, own, None)
        assert mx.allclose(got[index], expected[0], atol=1e-6)


def test_rows_come_and_go_as_latent_caches() -> None:
    """An inherited merge or extract would hand out a cache with another contract."""
    batch = LatentCache.merge([cache(), cache()])
    batch.update_and_fetch(*pair(2, 70))
    batch.filter([1])
    batch.extend(LatentCache.merge([cache()]))

    taken = batch.extract(0)

    assert type(taken) is LatentCache
    assert taken.offset == 70
    assert type(LatentCache.merge([taken])) is BatchLatentCache
    assert batch.trim(20) == 20
    assert batch.offset.tolist() == [50, 0]
