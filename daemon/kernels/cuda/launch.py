"""Attention of a row by the CUDA kernel that fits, and calls of the fast one: one node in MLX's graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np

from daemon.kernels.cuda import operands, plan, scanning
from daemon.kernels.cuda.layer import FEWEST, Layer, layer_of, on_device
from daemon.kernels.packing import TILE
from daemon.kernels.stored import Stored

Words = tuple[tuple[int, ...], ...]

_COUNTER_SETS = 256  # calls that may be under way at once


def attend(
    queries: mx.array, stored: Stored, scale: float, mask: mx.array | None, sinks: mx.array | None
) -> mx.array:
    """Attend from *queries* to everything *stored*, some of it packed; the contract is reference.attend's."""
    n_heads, length, _ = queries.shape
    n_kv, begin, end = stored.n_kv_heads, stored.packed_from, stored.packed_to
    spans = spans_of(((stored.length, begin, end, stored.dropped),))
    fits = plan.is_fast(stored.layout, n_heads // n_kv, length, masked=mask is not None)
    if fits and operands.dtypes_of(stored, queries.dtype) == {queries.dtype}:
        layer = layer_of(stored.layout, n_kv, stored.keys)
        if layer is not None:
            splits = plan.fast_splits(n_kv, (-(-end // TILE) - begin // TILE,))
            plain = _plain(stored, queries.dtype)
            assert stored.tiles is not None
            return fast(
                queries, None, plain, [stored.tiles], spans, layer, scale, splits, sinks=sinks
            )[0]
    return scanning.scan(queries, spans, stored, scale, mask, sinks)


def _plain(stored: Stored, dtype: mx.Dtype) -> mx.array:
    """Return what of *stored* is in full precision as the fast kernel reads it, (1, 2, KV heads, n, D)."""
    if stored.k.head is None and stored.k.tail is None:
        return mx.zeros((1, 2, stored.n_kv_heads, 1, stored.layout.dim_k), dtype=dtype)
    return mx.stack([stored.k.joined(), stored.v.joined()])[None]


def fast(
    queries: mx.array,
    fresh: tuple[mx.array, mx.array] | None,
    plain: mx.array,
    tiles: Sequence[mx.array],
    spans: mx.array,
    layer: Layer,
    scale: float,
    splits: int,
    *,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Attend from one query token of each row, in one node.

    Args:
        queries: ([B,] n_heads, 1, D); without B there is one row.
        fresh: keys and values of the newest tokens, ([B,] KV heads, 1, D) of the queries' dtype; None: they are in
            *plain*. *spans* say the same.
        plain: the rows' tokens in full precision, (B, 2, KV heads, slots, D) of the queries' dtype (plain.cuh).
        tiles: of each row, uint32 (KV heads, capacity, words), in fragments.
        spans: as spans_of gives them.
        layer: what layer_of gives.
        scale: factor of the scores.
        splits: parts into which the tiles of a head go.
        sinks: learned sink logits (n_heads,), or None.

    Returns:
        an array like *queries*, and *plain* with the newest tokens and without those that have left.
    """
    rows = len(tiles)
    n_heads, dim = queries.shape[-3], queries.shape[-1]
    dtype = queries.dtype
    variant = layer.variant(n_heads // layer.n_kv_heads, dtype, scale)
    room = plan.room_for(rows)
    assert room is not None, "more rows than there are inputs for"
    kernel = variant.kernel(room, sinks=sinks is not None)
    keys, values = (queries, queries) if fresh is None else fresh
    counters = next(_counter_sets(plan.counters_for(rows * n_heads)))
    inputs = [queries, keys, values, plain, spans, layer.constants, counters, *tiles]
    inputs += [tiles[0]] * (room - rows)
    if sinks is not None:
        inputs.append(sinks if sinks.dtype == dtype else sinks.astype(dtype))
    partial = rows * n_heads * splits * (dim + 2) if splits > 1 else FEWEST
    out, following, _ = kernel(
        inputs=inputs,
        grid=(splits * plan.THREADS, layer.n_kv_heads, rows),
        threadgroup=(plan.THREADS, 1, 1),
        output_shapes=[queries.shape, plain.shape, (partial,)],
        output_dtypes=[dtype, dtype, mx.float32],
    )
    return out, following


@lru_cache(maxsize=256)
def spans_of(rows: Words, grown: int = 0, *, fresh: bool = False) -> mx.array:
    """Return the words of `Span` (common.cuh) of each row, int32 (B, 16), the lengths *grown* by some.

    *fresh*: the newest tokens come by themselves. All layers of a step have the same spans, mostly.
    """
    words = _words(rows)
    words[:, 0] += grown
    words[:, 5] = fresh
    return on_device(words)


@lru_cache(maxsize=256)
def words_of(rows: Words) -> mx.array:
    """Return *rows* of up to 16 numbers for the kernels, int32 (B, 16), in the GPU's memory."""
    return on_device(_words(rows))


def _words(rows: Words) -> np.ndarray[Any, np.dtype[np.int32]]:
    words = np.zeros((len(rows), FEWEST), dtype=np.int32)
    words[:, : len(rows[0])] = rows
    return words


@cache
def _counter_sets(counters: int) -> cycle[mx.array]:
    """Return that many counters for one call after another: a call under way must not share its own with another."""
    sets = [mx.zeros((counters,), dtype=mx.uint32) for _ in range(_COUNTER_SETS)]
    mx.eval(sets)
    return cycle(sets)
