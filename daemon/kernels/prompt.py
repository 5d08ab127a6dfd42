"""Attention of many query tokens on a CPU: blocks of queries over blocks of tokens, with an online softmax.

MLX's own attention holds all scores of a layer on a CPU, [heads, queries, tokens]; here a block's are all
there is. Packed tokens are put on the int8 grid a block at a time, in the rotated basis, and their
steps, fractions and scales go into scores and weights (daemon.kernels.cpu). Numbers are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from daemon.kernels import codec, packing
from daemon.kernels.exponential import LOG2_E, exp2
from daemon.kernels.packing import TILE
from daemon.kernels.reference import narrowed
from daemon.kernels.rotation import Side
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import FP16, Codec

BLOCK_QUERIES = 256  # tokens
BLOCK_SCORES = 2**19  # 2 MB

_LOWEST = -1e30  # below every score, and finite, so that differences of two are numbers

Mask = mx.array | None


@dataclass(frozen=True, slots=True)
class _Block:
    """Vectors of one side of consecutive tokens, (H, T, dim): as the model made them, or on the grid in the rotated basis.

    A vector is (values + *fraction*)·factor, *factors* (H, T); None for one as it is.
    """

    values: mx.array
    factors: mx.array | None = None
    fraction: float = 0.0

    def products(self, queries: mx.array) -> mx.array:
        """Return the inner products with *queries* (H, N, dim) of the same basis: (H, N, T)."""
        products = queries @ self.values.swapaxes(-1, -2)
        if self.fraction:
            products = products + self.fraction * mx.sum(queries, axis=-1, keepdims=True)
        return products if self.factors is None else products * self.factors[:, None]

    def weighted_sum(self, weights: mx.array) -> mx.array:
        """Return the sum of the vectors under *weights* (H, N, T), in their own basis: (H, N, dim)."""
        if self.factors is not None:
            weights = weights * self.factors[:, None]
        out = weights @ self.values
        if self.fraction:
            out = out + self.fraction * mx.sum(weights, axis=-1, keepdims=True)
        return out


def attend(
    queries: mx.array, stored: Stored, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Return softmax(scale·q·kᵀ + mask)·v over everything *stored*; the contract is reference.attend's."""
    length = queries.shape[1]
    parts = [
        _attend_block(queries, at, min(at + BLOCK_QUERIES, length), stored, scale, mask, sinks)
        for at in range(0, length, BLOCK_QUERIES)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _attend_block(
    queries: mx.array,
    start: int,
    end: int,
    stored: Stored,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    """Attend from the queries from *start* to *end*."""
    n_heads, length, _ = queries.shape
    layout, n_kv = stored.layout, stored.n_kv_heads
    first = stored.length - length + start  # the token that the first query belongs to
    visible = stored.length if mask is not None else stored.length - length + end
    plain = queries[:, start:end].astype(mx.float32).reshape(n_kv, -1, queries.shape[2])
    plain = plain * (scale * LOG2_E)
    rotated = codec.rotate(
        plain if stored.keys is None else stored.keys.scaled(plain), layout.k, "k"
    )
    top, total = _begin(plain, sinks, end - start)
    # what came from values of either basis
    sums = {True: mx.zeros((*plain.shape[:2], layout.dim_v)), False: mx.zeros(())}
    tiles = [] if stored.tiles is None else [stored.tiles]
    for at, to, packed in _ranges(stored, visible, n_heads * (end - start)):
        stored = replace(stored, tiles=tiles[0]) if tiles else stored
        keys = _block(stored, "k", at, to, packed)
        on_grid = keys.factors is not None
        scores = keys.products(rotated if on_grid else plain)
        if on_grid and stored.keys is not None:
            bias = stored.keys.bias(plain, at + stored.dropped, to + stored.dropped)
            scores = scores if bias is None else scores + bias
        shape = (n_heads, end - start, to - at)
        scores = _masked(scores.reshape(shape), mask, start, end, first, at, to)
        scores = scores.reshape(n_kv, -1, to - at)
        higher = mx.maximum(top, mx.max(scores, axis=-1, keepdims=True))
        weights, shrink = exp2(scores - higher), exp2(top - higher)
        values = _block(stored, "v", at, to, packed)
        total = total * shrink + mx.sum(weights, axis=-1, keepdims=True)
        sums = {basis: part * shrink for basis, part in sums.items()}
        basis = values.factors is not None
        sums[basis] = sums[basis] + values.weighted_sum(weights)
        top = higher
        # MLX would compute blocks side by side, and hold them all
        plain, rotated, *tiles = mx.depends([plain, rotated, *tiles], [total, *sums.values()])
    out = (codec.unrotate(sums[True], layout.v, "v") + sums[False]) / total
    return narrowed(out.reshape(n_heads, end - start, -1), queries.dtype)


def _begin(queries: mx.array, sinks: mx.array | None, count: int) -> tuple[mx.array, mx.array]:
    """Return the largest score and the sum of weights before any token: those of the learned *sinks*, if there are."""
    shape = (*queries.shape[:2], 1)
    if sinks is None:
        return mx.full(shape, _LOWEST), mx.zeros(shape)
    logits = sinks.astype(mx.float32).reshape(shape[0], -1, 1) * LOG2_E
    return mx.repeat(logits, count, axis=1), mx.ones(shape)


def _ranges(stored: Stored, visible: int, rows: int) -> Iterator[tuple[int, int, bool]]:
    """Yield ranges of the *visible* tokens that *rows* of scores may have at once, and whether they are packed."""
    step = max(TILE, BLOCK_SCORES // rows // TILE * TILE)
    head = _head(stored)
    tail = head + stored.packed_to - stored.packed_from
    for start, end, packed in (0, head, False), (head, tail, True), (tail, stored.length, False):
        at, end = start, min(end, visible)
        while at < end:
            to = min((at // TILE * TILE) + step, end)
            yield at, to, packed
            at = to


def _head(stored: Stored) -> int:
    """Return how many tokens come before the packed ones and the tail, of sides that have these."""
    layout = stored.layout
    raw = stored.k if layout.k != FP16 else stored.v if layout.v != FP16 else None
    return 0 if raw is None or raw.head is None else raw.head.shape[1]


def _block(stored: Stored, side: Side, at: int, to: int, packed: bool) -> _Block:
    """Return the vectors of the tokens from *at* to *to*, all of them packed or none."""
    layout = stored.layout
    kind, dim, raw = (
        (layout.k, layout.dim_k, stored.k) if side == "k" else (layout.v, layout.dim_v, stored.v)
    )
    if kind == FP16 or not packed:
        return _Block(_plain(stored, raw, kind, at, to))
    assert stored.tiles is not None
    tile = at // TILE
    tiles = stored.tiles[:, tile : -(-to // TILE)]
    inside = slice(at - tile * TILE, to - tile * TILE)
    codes = packing.codes_of(tiles, layout, side)[:, inside]
    scales = packing.scales_of(tiles, layout, side)[:, inside]
    if kind.affine:
        values, factors = codec.decode(codes, scales, kind)
        return _Block(values, factors)
    unit = codec.grid_unit(kind, dim)
    numbers = codec.grid(codes, kind).astype(mx.float32)
    return _Block(numbers, scales.astype(mx.float32) * unit.step, unit.fraction)


def _plain(stored: Stored, raw: RawSide, kind: Codec, at: int, to: int) -> mx.array:
    """Return the vectors of the tokens from *at* to *to* of a side, which are all in its head or all in its tail."""
    head = _head(stored)
    part = raw.head
    if kind != FP16 and at >= head:
        before = head + stored.packed_to - stored.packed_from
        part, at, to = raw.tail, at - before, to - before
    assert part is not None
    return part[:, at:to].astype(mx.float32)


def _masked(
    scores: mx.array, mask: Mask, start: int, end: int, first: int, at: int, to: int
) -> mx.array:
    """Return *scores* (n_heads, queries, tokens) of queries *start* to *end* and tokens *at* to *to*, masked.

    *first* is the token of the first query; without a *mask*, queries see no later tokens than their own.
    """
    if mask is None:
        if to <= first + 1:
            return scores
        mask = mx.arange(first, first + end - start)[:, None] >= mx.arange(at, to)[None]
    else:
        rows = slice(start, end) if mask.shape[-2] > 1 else slice(None)
        mask = mask[..., rows, at:to] if mask.shape[-1] > 1 else mask[..., rows, :]
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, -mx.inf)
    return scores + mask.astype(mx.float32) * LOG2_E
