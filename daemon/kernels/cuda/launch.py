"""Calls of the CUDA kernels: arrays in, one node or a few in MLX's graph out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import cycle
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from daemon.kernels import codebook, codec, trellis
from daemon.kernels.cuda import plan, sources
from daemon.kernels.cuda.layer import Layer, bits_of, layer_of, on_device
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16, INT8, Codec

Words = tuple[tuple[int, ...], ...]

_SPAN_WORDS = 16  # an array of 8 bytes or fewer would live in memory that a GPU reads over PCIe
_COUNTER_SETS = 256  # calls that may be under way at once


def attend(
    queries: mx.array, stored: Stored, scale: float, mask: mx.array | None, sinks: mx.array | None
) -> mx.array:
    """Attend from *queries* to everything *stored*, some of it packed; the contract is reference.attend's."""
    n_heads, length, _ = queries.shape
    n_kv, begin, end = stored.n_kv_heads, stored.packed_from, stored.packed_to
    raw = Raw.of(stored, queries.dtype)
    spans = spans_of(((stored.length, begin, end, stored.dropped),))
    tiles = stored.tiles
    assert tiles is not None
    fits = plan.is_fast(stored.layout, n_heads // n_kv, length, masked=mask is not None)
    if fits and raw.k_head.dtype == raw.v_head.dtype == queries.dtype:
        layer = layer_of(stored.layout, n_kv, stored.keys)
        if layer is not None:
            splits = plan.fast_splits(n_kv, (-(-end // TILE) - begin // TILE,))
            plain = _plain(stored, queries.dtype)
            return fast(queries, None, plain, [tiles], spans, layer, scale, splits, sinks=sinks)[0]
    return scan(queries, tiles, spans, raw, stored, scale, mask, sinks)


def _plain(stored: Stored, dtype: mx.Dtype) -> mx.array:
    """Return what of *stored* is in full precision as the fast kernel reads it, (1, 2, KV heads, n, D)."""
    if stored.k.head is None and stored.k.tail is None:
        return mx.zeros((1, 2, stored.n_kv_heads, 1, stored.layout.dim_k), dtype=dtype)
    return mx.stack([stored.k.joined(), stored.v.joined()])[None]


@dataclass(frozen=True, slots=True)
class Raw:
    """Keys and values in full precision, (H, n, D) each: what comes before the packed tokens, and after them."""

    k_head: mx.array
    k_tail: mx.array
    v_head: mx.array
    v_tail: mx.array

    @classmethod
    def of(cls, stored: Stored, dtype: mx.Dtype) -> Raw:
        """Return those of *stored*; something of *dtype* stands where there is none, and is not read."""
        k, v = stored.k, stored.v
        return cls(*_both(k.head, k.tail, dtype), *_both(v.head, v.tail, dtype))


def _both(
    head: mx.array | None, tail: mx.array | None, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Return *head* and *tail*, with something of the same dtype in the place of what there is not."""
    if head is not None and tail is not None:
        return head, tail
    some = head if head is not None else tail
    nothing = _nothing(dtype if some is None else some.dtype)
    return nothing if head is None else head, nothing if tail is None else tail


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
    partial = rows * n_heads * splits * (dim + 2) if splits > 1 else _SPAN_WORDS
    out, following, _ = kernel(
        inputs=inputs,
        grid=(splits * plan.THREADS, layer.n_kv_heads, rows),
        threadgroup=(plan.THREADS, 1, 1),
        output_shapes=[queries.shape, plain.shape, (partial,)],
        output_dtypes=[dtype, dtype, mx.float32],
    )
    return out, following


def scan(
    queries: mx.array,
    tiles: mx.array,
    spans: mx.array,
    raw: Raw,
    stored: Stored,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend from *queries* (n_heads, L, D) of one row, by the general kernel."""
    layout, n_kv = stored.layout, stored.n_kv_heads
    n_heads, length, _ = queries.shape
    grouped = n_heads // n_kv
    k_packed, v_packed = layout.k != FP16, layout.v != FP16
    mean = _scan_mean(stored) if k_packed else _no_mean()
    shared = plan.scan_shared_bytes(layout.dim_k, layout.dim_v, mean.width)
    blocks = plan.scan_blocks(grouped, length)
    splits = plan.scan_splits(n_kv, blocks, stored.length)
    inputs = [
        queries,
        _rotated(queries, stored) if k_packed else _nothing(mx.float32),
        tiles, spans, raw.k_head, raw.k_tail, raw.v_head, raw.v_tail,
        _levels(layout.k, layout.dim_k), _levels(layout.v, layout.dim_v),
        mean.mean, mean.pairs, mean.plain, mean.table,
    ]  # fmt: skip
    if mask is not None:
        inputs.append(_added(mask, length, stored.length))
    kernel = sources.scan_kernel(shared, masked=mask is not None)
    rows = n_heads * length
    (sums,) = kernel(
        inputs=inputs,
        template=[
            ("DIM_K", layout.dim_k), ("DIM_V", layout.dim_v), ("K_HALVES", int(2 * layout.k.bits)),
            ("K_TRELLIS", layout.k.trellis), ("V_HALVES", int(2 * layout.v.bits)),
            ("V_TRELLIS", layout.v.trellis), ("ORDER", layout.order), ("GROUPED", grouped),
            ("QUERIES", length), ("N_PAIRS", mean.n_pairs), ("N_PLAIN", mean.n_plain),
            ("SCALE", bits_of(scale)), ("SHARED", shared), ("Q", queries.dtype),
            ("K", raw.k_head.dtype), ("V", raw.v_head.dtype),
        ],
        grid=(splits * blocks * plan.SCAN_THREADS, n_kv, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(splits, rows * 2 * (layout.dim_v + 1))],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    (merged,) = sources.merge_kernel(sinks=sinks is not None)(
        inputs=[sums] if sinks is None else [sums, sinks],
        template=[
            ("DIM_V", layout.dim_v), ("HEADS", n_heads), ("QUERIES", length),
            ("L", mx.float32 if sinks is None else sinks.dtype),
        ],
        grid=(rows * plan.SCAN_THREADS, 1, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(n_heads, length, 2, layout.dim_v)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    out: mx.array = merged[:, :, 1]
    if v_packed:
        out = out + codec.unrotate(merged[:, :, 0], layout.v, "v")
    return out.astype(queries.dtype)


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
    words = np.zeros((len(rows), _SPAN_WORDS), dtype=np.int32)
    words[:, : len(rows[0])] = rows
    return words


@dataclass(frozen=True, slots=True)
class _ScanMean:
    """The key mean of a layer as the general kernel reads it (`Mean` in scan.cuh)."""

    mean: mx.array
    pairs: mx.array
    plain: mx.array
    table: mx.array
    n_pairs: int
    n_plain: int

    @property
    def width(self) -> int:
        """Columns of the table that are used."""
        return 2 * self.n_pairs + (self.n_plain > 0)


_CHANNELS: WeakKeyDictionary[KeyTransform, tuple[mx.array, mx.array]] = WeakKeyDictionary()


def _scan_mean(stored: Stored) -> _ScanMean:
    keys = stored.keys
    if keys is None or keys.mean is None:
        return _no_mean()
    dim, rotary = stored.layout.dim_k, keys.rotary
    pairs = [] if rotary is None else list(zip(rotary.first, rotary.second, strict=True))
    plain = list(range(dim)) if rotary is None else list(rotary.plain)
    if keys not in _CHANNELS:
        _CHANNELS[keys] = (_indices([at for pair in pairs for at in pair]), _indices(plain))
    table = (
        mx.ones((1, _SPAN_WORDS))
        if rotary is None
        else rotary.whole_table(stored.packed_positions[1])
    )
    return _ScanMean(keys.mean, *_CHANNELS[keys], table, len(pairs), len(plain))


@cache
def _no_mean() -> _ScanMean:
    none, numbers = _indices([]), _nothing(mx.float32)
    return _ScanMean(numbers, none, none, numbers[0], 0, 0)


def _indices(channels: list[int]) -> mx.array:
    return on_device(np.array(channels + [0] * _SPAN_WORDS, dtype=np.int32))


def _rotated(queries: mx.array, stored: Stored) -> mx.array:
    """Return *queries* as packed keys want them: scaled per channel, and in the stored basis; float32."""
    if stored.keys is None:
        return codec.rotate(queries, stored.layout.k, "k")
    n_heads, length, dim = queries.shape
    grouped = queries.astype(mx.float32).reshape(stored.n_kv_heads, -1, dim)
    rotated = codec.rotate(stored.keys.scaled(grouped), stored.layout.k, "k")
    return rotated.reshape(n_heads, length, dim)


def _added(mask: mx.array, queries: int, length: int) -> mx.array:
    """Return *mask* as numbers to add, float32 (1 or n_heads, queries, length)."""
    if mask.dtype == mx.bool_:
        mask = mx.where(mask, 0.0, -mx.inf)
    mask = mask.astype(mx.float32)
    heads = mask.shape[0] if mask.ndim == 3 else 1
    return mx.contiguous(mx.broadcast_to(mask, (heads, queries, length)))


@cache
def _levels(kind: Codec, dim: int) -> mx.array:
    """Return the centroids of *kind* for the general kernel, or the step of its trellis, float32 (32,)."""
    levels = np.zeros(32, dtype=np.float32)
    if kind.trellis:
        levels[0] = trellis.STEP
    elif kind not in (FP16, INT8):
        values = codebook.centroids(kind.bits, dim)
        levels[: len(values)] = values
    return on_device(levels)


@cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((1, 1, _SPAN_WORDS), dtype=dtype)


@cache
def _counter_sets(counters: int) -> cycle[mx.array]:
    """Return that many counters for one call after another: a call under way must not share its own with another."""
    sets = [mx.zeros((counters,), dtype=mx.uint32) for _ in range(_COUNTER_SETS)]
    mx.eval(sets)
    return cycle(sets)
