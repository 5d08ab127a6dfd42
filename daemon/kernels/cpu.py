"""Attention over packed keys and values on a CPU: the reference's numbers, in blocks that stay in its caches.

A block of tiles is unpacked, put on the int8 grid and multiplied before the next one is touched, so full
precision never reaches memory; going there costs more time than the codes save. Steps, fractions and
scales are paid once per token instead of once per value. Scores are in powers of two throughout. A long row
is divided into parts, which attend side by side, each with its own softmax: MLX gives a stream a thread,
and its elementwise operations use one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import mlx.core as mx

from daemon.kernels import codec, packing
from daemon.kernels.case import Case
from daemon.kernels.exponential import LOG2_E, exp2
from daemon.kernels.packing import TILE
from daemon.kernels.reference import narrowed
from daemon.kernels.rotation import Side
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import FP16, Codec

# of one side in one block: 4 MB in float32; smaller ones cost more in calls than they save
BLOCK_VALUES = 2**20

# multiplications: a larger product OpenBLAS packs and divides, which takes several times as long for few queries
SMALL_PRODUCT = 10**6

FEW_TOKENS = 256  # up to which BLAS takes keys that are transposed as they are
DIVIDED_VALUES = 2**19  # of one side, from which on a row is divided
LANES = 2  # parts of a long row, and streams that attend to them: more have not been tried

_LOWEST = -1e30  # below every score, and finite, so that differences of two are numbers

Mask = mx.array | None


class Asked(NamedTuple):
    """Queries (H, N, dim) in float32, scaled: as they are, and in the basis and the steps of packed keys."""

    plain: mx.array
    rotated: mx.array


class Part(NamedTuple):
    """Consecutive tokens of a row, from its token *first* on, as a row of their own, and the stream that attends to them."""

    stored: Stored
    first: int
    stream: mx.Stream


class Found(NamedTuple):
    """What queries found in a part: the largest score, the sum of weights relative to it, (H, N, 1), and that of values."""

    top: mx.array
    total: mx.array
    values: mx.array


def refusal(case: Case) -> str | None:
    """Return why these kernels cannot do *case*, in words for the status; None: they can."""
    affine = [kind.name for kind in (case.k, case.v) if kind.affine]
    return f"{affine[0]} is there to compare with, not to be fast" if affine else None


def attend(
    queries: mx.array, stored: Stored, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Return softmax(scale·q·kᵀ + mask)·v over everything *stored*, some of it packed; reference.attend's contract."""
    n_heads, length, dim = queries.shape
    plain = queries.astype(mx.float32).reshape(stored.n_kv_heads, -1, dim) * (scale * LOG2_E)
    asked = Asked(plain, _rotated(plain, stored))
    found = []
    for part in _parts(stored):
        with mx.stream(part.stream):
            scores = _masked(
                _scores(asked, part.stored), mask, part, (n_heads, length, stored.length)
            )
            top = mx.max(scores, axis=-1, keepdims=True)
            if mask is not None or length > 1:  # a query may see none of these tokens
                top = mx.maximum(top, _LOWEST)
            weights = exp2(scores - top)
            total = mx.sum(weights, axis=-1, keepdims=True)
            found.append(Found(top, total, _weighted_sum(weights, part.stored)))
    if sinks is not None:
        logits = sinks.astype(mx.float32).reshape(stored.n_kv_heads, -1, 1) * LOG2_E
        logits = mx.repeat(logits, length, axis=1)
        found.append(Found(logits, mx.ones(logits.shape), mx.zeros(logits.shape)))
    return narrowed(_merged(found).reshape(n_heads, length, -1), queries.dtype)


def _rotated(queries: mx.array, stored: Stored) -> mx.array:
    """Return *queries* in the basis of packed keys, times what a grid step of theirs is worth."""
    kind = stored.layout.k
    if kind == FP16:
        return queries
    keys, step = stored.keys, codec.grid_unit(kind, stored.layout.dim_k).step
    rotated = codec.rotate(queries if keys is None else keys.scaled(queries), kind, "k")
    return rotated if step == 1.0 else rotated * step


def _parts(stored: Stored) -> Iterator[Part]:
    """Yield the parts of a row, a lane each, divided between tiles; a short row is one part."""
    layout, tiles = stored.layout, stored.tiles_in_use()
    heads, count, _ = tiles.shape
    long = heads * count * TILE * max(layout.dim_k, layout.dim_v) > DIVIDED_VALUES
    lanes = _lanes() if long else (mx.default_stream(mx.cpu),)
    begin = stored.packed_from // TILE  # tiles before it hold no token
    step = -(-(count - begin) // len(lanes))
    for to, lane in zip(range(begin + step, count + step, step), lanes, strict=False):
        at = 0 if to == begin + step else to - step
        last = to >= count
        first, end = at * TILE, stored.length if last else to * TILE
        some = replace(
            stored,
            length=end - first,
            packed_from=max(0, stored.packed_from - first),
            packed_to=min(end, stored.packed_to) - first,
            tiles=tiles[:, at:to],
            k=_raw(stored.k, layout.k, first, end, last=last),
            v=_raw(stored.v, layout.v, first, end, last=last),
            dropped=stored.dropped + first,
        )
        yield Part(some, first, lane)


def _raw(raw: RawSide, kind: Codec, first: int, end: int, *, last: bool) -> RawSide:
    """Return what a part has in full precision: its tokens, or, of a packed side, head and tail at the row's ends."""
    if kind == FP16:
        return RawSide(None if raw.head is None else raw.head[:, first:end], None)
    return RawSide(raw.head if first == 0 else None, raw.tail if last else None)


def _merged(found: Sequence[Found]) -> mx.array:
    """Return the weighted mean of the values of all parts, (H, N, dim_v)."""
    if len(found) == 1:
        return found[0].values / found[0].total
    top = reduce(mx.maximum, (part.top for part in found))
    shrinks = [exp2(part.top - top) for part in found]
    totals = [part.total * shrink for part, shrink in zip(found, shrinks, strict=True)]
    values = [part.values * shrink for part, shrink in zip(found, shrinks, strict=True)]
    return reduce(mx.add, values) / reduce(mx.add, totals)


def _scores(asked: Asked, stored: Stored) -> mx.array:
    """Return the scores of all tokens, (H, N, T up to whole tiles): what fills the last tile up is -inf.

    So most steps meet the shapes of the step before, for which their chains are compiled.
    """
    parts = [] if stored.k.head is None else [_raw_scores(asked.plain, stored.k.head)]
    if stored.layout.k != FP16:
        parts.append(_packed_scores(asked, stored, stored.layout.k))
    if stored.k.tail is not None:
        parts.append(_raw_scores(asked.plain, stored.k.tail))
    if spare := -stored.length % TILE:
        parts.append(mx.full((*asked.plain.shape[:2], spare), -mx.inf))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _raw_scores(queries: mx.array, keys: mx.array) -> mx.array:
    """Return the products of *queries* with *keys* in full precision (H, T, dim), of which there may be few or many."""
    if keys.shape[1] > FEW_TOKENS:
        return _products(queries, _raw_blocks(keys, queries.shape[1]))
    return queries @ keys.astype(mx.float32).swapaxes(-1, -2)


def _products(queries: mx.array, blocks: Iterable[mx.array]) -> mx.array:
    """Return the products of *queries* (H, N, dim) with the vectors in *blocks* (H, tokens, dim): (H, N, T).

    BLAS is faster with few queries on the right.
    """
    columns = mx.contiguous(queries.swapaxes(-1, -2))
    products = [vectors @ columns for vectors in blocks]
    joined = products[0] if len(products) == 1 else mx.concatenate(products, axis=1)
    return mx.contiguous(joined.swapaxes(-1, -2))


def _packed_scores(asked: Asked, stored: Stored, kind: Codec) -> mx.array:
    unit = codec.grid_unit(kind, stored.layout.dim_k)
    scores = _products(asked.rotated, _grids(stored, "k", asked.rotated.shape[1]))
    if unit.fraction:
        scores = scores + unit.fraction * mx.sum(asked.rotated, axis=-1, keepdims=True)
    scores = scores * _scales(stored, "k")[:, None]
    scores = scores[..., stored.packed_from : stored.packed_to]
    keys = stored.keys
    bias = None if keys is None else keys.bias(asked.plain, *stored.packed_positions)
    return scores if bias is None else scores + bias


def _weighted_sum(weights: mx.array, stored: Stored) -> mx.array:
    """Return Σ weight·value over all tokens, (H, N, dim_v)."""
    start, end = stored.packed_from, stored.packed_to
    kind, rows = stored.layout.v, weights.shape[1]
    sums = []
    if kind != FP16:
        unit = codec.grid_unit(kind, stored.layout.dim_v)
        scales = _scales(stored, "v")
        slots = scales.shape[1]
        if start > 0 or end < slots:  # slots that hold no token of this row weigh nothing
            scales = mx.pad(scales[:, start:end], [(0, 0), (start, slots - end)])
        packed = weights[..., :slots] * scales[:, None]
        out = _sum(packed, 0, _grids(stored, "v", rows))
        if unit.fraction:
            out = out + unit.fraction * mx.sum(packed, axis=-1, keepdims=True)
        sums.append(codec.unrotate(out if unit.step == 1.0 else out * unit.step, kind, "v"))
    for raw, at in ((stored.v.head, 0), (stored.v.tail, end)):
        if raw is not None:
            sums.append(_sum(weights, at, _raw_blocks(raw, rows)))
    return reduce(mx.add, sums)


def _sum(weights: mx.array, at: int, blocks: Iterable[mx.array]) -> mx.array:
    """Return the sum of the vectors of *blocks*, times *weights* (H, N, T) from token *at* on."""
    sums = []
    for vectors in blocks:
        sums.append(weights[..., at : at + vectors.shape[1]] @ vectors)
        at += vectors.shape[1]
    return reduce(mx.add, sums)


def _raw_blocks(raw: mx.array, rows: int) -> Iterator[mx.array]:
    """Yield the vectors *raw* (H, T, dim) in float32, a block of tokens at a time, for *rows* queries a head."""
    step = _block_tokens(raw.shape[0], raw.shape[2], rows)
    for at in range(0, raw.shape[1], step):
        yield raw[:, at : at + step].astype(mx.float32)


def _grids(stored: Stored, side: Side, rows: int) -> Iterator[mx.array]:
    """Yield the grid numbers of one side of all tiles, float32 (H, tokens, dim), a block of tiles at a time."""
    tiles, layout = stored.tiles_in_use(), stored.layout
    of = layout.side(side)
    count = tiles.shape[1]
    most = _block_tokens(tiles.shape[0], of.dim, rows) // TILE
    step = -(-count // -(-count // most))
    for at in range(0, count, step):
        codes = packing.codes_of(tiles[:, at : at + step], layout, side)
        yield codec.grid(codes, of.codec).astype(mx.float32)


def _block_tokens(heads: int, dim: int, rows: int) -> int:
    """Return how many tokens, whole tiles, a block has of vectors that are multiplied with *rows* queries a head."""
    most, small = BLOCK_VALUES // (heads * dim), SMALL_PRODUCT // (rows * dim)
    return max(TILE, (small if most // 4 <= small < most else most) // TILE * TILE)


class _Thread(threading.local):
    """What belongs to a thread of Python's: MLX lets no other one use its streams."""

    lanes: tuple[mx.Stream, ...] | None = None


_THREAD = _Thread()


def _lanes() -> tuple[mx.Stream, ...]:
    """Return the streams of this thread: the default one and, where there are cores for it, others."""
    if _THREAD.lanes is None:
        more = range(min(LANES, _cores()) - 1)
        _THREAD.lanes = mx.default_stream(mx.cpu), *(mx.new_stream(mx.cpu) for _ in more)
    return _THREAD.lanes


def _cores() -> int:
    """Return the cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _scales(stored: Stored, side: Side) -> mx.array:
    """Return the scale of each slot of the tiles, float32 (H, slots)."""
    return packing.scales_of(stored.tiles_in_use(), stored.layout, side).astype(mx.float32)


def _masked(scores: mx.array, mask: Mask, part: Part, row: tuple[int, int, int]) -> mx.array:
    """Return *scores* (H, N, T or more) of *part* with *mask* in force, which may be None for causal.

    *row* is the shape that the mask of the whole row broadcasts to: query heads, query tokens, tokens.
    """
    n_heads, length, total = row
    first, count, width = part.first, part.stored.length, scores.shape[-1]
    if mask is None:
        if length == 1 or first + count <= total - length + 1:
            return scores
        newest = mx.arange(total - length, total)
        mask = newest[:, None] >= mx.arange(first, first + width)[None]
    else:
        mask = mx.broadcast_to(mask, (*mask.shape[:-1], total))[..., first : first + count]
        if width > count:
            mask = mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, width - count)])
    apart = scores.reshape(n_heads, length, width)
    if mask.dtype == mx.bool_:
        apart = mx.where(mask, apart, -mx.inf)
    else:
        apart = apart + mask.astype(mx.float32) * LOG2_E
    return apart.reshape(scores.shape)
