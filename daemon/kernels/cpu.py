"""Attention over packed keys and values on a CPU: the reference's numbers, in blocks that stay in its caches.

A block of tiles is unpacked, put on the int8 grid and multiplied before the next one is touched, so full
precision never reaches memory; going there costs more time than the codes save. Steps, fractions and
scales are paid once per token instead of once per value. Scores are in powers of two throughout. Rows of
several blocks are divided over two streams: MLX gives each a thread, and its elementwise operations use one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import NamedTuple

import mlx.core as mx

from daemon.kernels import codec, packing
from daemon.kernels.case import Case
from daemon.kernels.exponential import LOG2_E, exp2
from daemon.kernels.packing import TILE
from daemon.kernels.reference import narrowed
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16, Codec

# of one side in one block: 2 MB in float32; smaller ones cost more in calls than they save
BLOCK_VALUES = 2**19

LANES = 2  # streams that long rows are divided over: more have not been tried

Mask = mx.array | None


class Block(NamedTuple):
    """Vectors of some tokens, float32 (H, tokens, dim), and the stream that computes them and with them."""

    vectors: mx.array
    stream: mx.Stream


def refusal(case: Case) -> str | None:
    """Return why these kernels cannot do *case*, in words for the status; None: they can."""
    affine = [kind.name for kind in (case.k, case.v) if kind.affine]
    return f"{affine[0]} is there to compare with, not to be fast" if affine else None


def attend(
    queries: mx.array, stored: Stored, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Return softmax(scale·q·kᵀ + mask)·v over everything *stored*, some of it packed; reference.attend's contract."""
    n_heads, length, dim = queries.shape
    grouped = queries.astype(mx.float32).reshape(stored.n_kv_heads, -1, dim) * (scale * LOG2_E)
    scores = _scores(grouped, stored)
    scores = _masked(scores.reshape(n_heads, length, -1), mask, stored.length).reshape(scores.shape)
    top = mx.max(scores, axis=-1, keepdims=True)
    if sinks is None:
        weights = exp2(scores - top)
        total = mx.sum(weights, axis=-1, keepdims=True)
    else:
        logits = sinks.astype(mx.float32).reshape(stored.n_kv_heads, -1, 1) * LOG2_E
        logits = mx.repeat(logits, length, axis=1)
        top = mx.maximum(top, logits)
        weights = exp2(scores - top)
        total = mx.sum(weights, axis=-1, keepdims=True) + exp2(logits - top)
    out = _weighted_sum(weights, stored) / total
    return narrowed(out.reshape(n_heads, length, -1), queries.dtype)


def _scores(queries: mx.array, stored: Stored) -> mx.array:
    """Return the scores of all tokens, (H, N, T up to whole tiles): what fills the last tile up is -inf.

    So most steps meet the shapes of the step before, for which their chains are compiled.
    """
    columns = mx.contiguous(queries.swapaxes(-1, -2))
    parts = [] if stored.k.head is None else [_products(columns, _raw_blocks(stored.k.head))]
    if stored.layout.k != FP16:
        parts.append(_packed_scores(queries, stored, stored.layout.k))
    if stored.k.tail is not None:
        parts.append(_products(columns, _raw_blocks(stored.k.tail)))
    if spare := -stored.length % TILE:
        parts.append(mx.full((*queries.shape[:2], spare), -mx.inf))
    return mx.concatenate(parts, axis=-1)


def _products(columns: mx.array, blocks: Iterable[Block]) -> mx.array:
    """Return the products of queries, which are *columns* (H, dim, N), with the vectors in *blocks*: (H, N, T).

    BLAS is faster with few queries on the right.
    """
    products = [mx.matmul(block.vectors, columns, stream=block.stream) for block in blocks]
    joined = products[0] if len(products) == 1 else mx.concatenate(products, axis=1)
    return mx.contiguous(joined.swapaxes(-1, -2))


def _packed_scores(queries: mx.array, stored: Stored, kind: Codec) -> mx.array:
    keys, unit = stored.keys, codec.grid_unit(kind, stored.layout.dim_k)
    rotated = codec.rotate(queries if keys is None else keys.scaled(queries), kind, "k")
    scores = _products(mx.contiguous(rotated.swapaxes(-1, -2)), _grids(stored, "k"))
    if unit.fraction:
        scores = scores + unit.fraction * mx.sum(rotated, axis=-1, keepdims=True)
    scores = (scores * _factors(stored, "k")[:, None])[..., stored.packed_from : stored.packed_to]
    bias = None if keys is None else keys.bias(queries, *stored.packed_positions)
    return scores if bias is None else scores + bias


def _weighted_sum(weights: mx.array, stored: Stored) -> mx.array:
    """Return Σ weight·value over all tokens, (H, N, dim_v)."""
    start, end = stored.packed_from, stored.packed_to
    kind = stored.layout.v
    out = mx.zeros((*weights.shape[:2], stored.layout.dim_v))
    if kind != FP16:
        unit = codec.grid_unit(kind, stored.layout.dim_v)
        packed = weights[..., start:end] * _factors(stored, "v")[:, None, start:end]
        # slots that hold no token of this row weigh nothing
        packed = mx.pad(packed, [(0, 0), (0, 0), (start, -end % TILE)])
        out = _sum(packed, 0, _grids(stored, "v"), out)
        if unit.fraction:
            out = out + unit.fraction * mx.sum(packed, axis=-1, keepdims=True)
        out = codec.unrotate(out, kind, "v")
    for raw, at in ((stored.v.head, 0), (stored.v.tail, end)):
        out = _sum(weights, at, _raw_blocks(raw), out)
    return out


def _sum(weights: mx.array, at: int, blocks: Iterable[Block], out: mx.array) -> mx.array:
    """Return *out* plus the vectors of *blocks*, times *weights* (H, N, T) from token *at* on."""
    sums: dict[mx.Stream, mx.array] = {}
    for vectors, stream in blocks:
        some = mx.matmul(weights[..., at : at + vectors.shape[1]], vectors, stream=stream)
        sums[stream] = mx.add(sums[stream], some, stream=stream) if stream in sums else some
        at += vectors.shape[1]
    return sum(sums.values(), out)


def _raw_blocks(raw: mx.array | None) -> Iterator[Block]:
    """Yield the vectors *raw* (H, T, dim), a block of tokens at a time."""
    if raw is None:
        return
    stream = mx.default_stream(mx.cpu)
    step = max(1, BLOCK_VALUES // (raw.shape[0] * raw.shape[2]))
    for at in range(0, raw.shape[1], step):
        yield Block(raw[:, at : at + step].astype(mx.float32), stream)


def _grids(stored: Stored, side: Side) -> Iterator[Block]:
    """Yield the grid numbers of one side of all tiles, a block of tiles at a time, the lanes in turn."""
    tiles, layout = stored.tiles_in_use(), stored.layout
    kind, dim = (layout.k, layout.dim_k) if side == "k" else (layout.v, layout.dim_v)
    most = max(1, BLOCK_VALUES // (tiles.shape[0] * TILE * dim))
    blocks = -(-tiles.shape[1] // most)
    streams = _lanes() if blocks >= LANES else (mx.default_stream(mx.cpu),)
    step = -(-tiles.shape[1] // (-(-blocks // len(streams)) * len(streams)))
    for at, stream in zip(range(0, tiles.shape[1], step), cycle(streams), strict=False):
        with mx.stream(stream):
            codes = packing.codes_of(tiles[:, at : at + step], layout, side)
            vectors = codec.grid(codes, kind).astype(mx.float32)
        yield Block(vectors, stream)


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


def _factors(stored: Stored, side: Side) -> mx.array:
    """Return what a grid step of each slot of the tiles is worth, float32 (H, slots)."""
    layout = stored.layout
    kind, dim = (layout.k, layout.dim_k) if side == "k" else (layout.v, layout.dim_v)
    scales = packing.scales_of(stored.tiles_in_use(), layout, side).astype(mx.float32)
    return scales * codec.grid_unit(kind, dim).step


def _masked(scores: mx.array, mask: Mask, total: int) -> mx.array:
    """Return *scores* (n_heads, L, T or more) with *mask* in force, which may be None for causal."""
    length, width = scores.shape[-2:]
    if mask is None:
        if length == 1:
            return scores
        mask = mx.arange(total - length, total)[:, None] >= mx.arange(width)[None]
    elif width > total:
        whole = mx.broadcast_to(mask, (*mask.shape[:-1], total))
        mask = mx.pad(whole, [(0, 0)] * (mask.ndim - 1) + [(0, width - total)])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, -mx.inf)
    return scores + mask.astype(mx.float32) * LOG2_E
