"""Attention over packed keys and values in three Metal kernels: what Apple GPUs run when a few tokens attend.

Two passes of online softmax over the canonical tiles, which are read as they are: attend.metal gives
partial results of blocks of tokens, merge.metal puts them together. Before them turn.metal brings queries
into the basis of packed keys; what came from packed values leaves its basis in the merge.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from daemon.kernels import rotation
from daemon.kernels.case import Case
from daemon.kernels.keys import KeyTransform
from daemon.kernels.metal import operands, sources
from daemon.kernels.packing import TILE
from daemon.kernels.reference import FUSED_QUERIES
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16

_LOG2E = 1.4426950408889634  # kernels compute powers of two
_SIMDGROUPS = 4  # of a threadgroup in the first pass
_MERGING = 8  # in the second
_MAX_BLOCKS = 64  # of packed tokens, for each KV head
_TILES_A_BLOCK = 2  # at least
_PLAIN_BLOCKS = 4
# Values of tokens whose weights are together below this share of the largest weight are not read.
_NEGLIGIBLE = 2.0**-12


def refusal(case: Case) -> str | None:
    """Return why these kernels cannot do *case*, in words for the status; None: they can."""
    if unread(case):
        return unread(case)
    if case.queries > FUSED_QUERIES:
        return f"Metal kernels serve {FUSED_QUERIES} query tokens at a time, not {case.queries}"
    if case.n_heads % case.n_kv_heads:
        return f"{case.n_heads} query heads are no multiple of {case.n_kv_heads} KV heads"
    return None


def unread(case: Case) -> str | None:
    """Return why Metal's kernels do not read what *case* attends to; None: they do."""
    for kind in (case.k, case.v):
        if kind.affine:
            return f"Metal kernels do not read {kind.name}"
    for dim in (case.dim_k, case.dim_v):
        if dim not in operands.DIMS:
            return f"Metal kernels read vectors of {', '.join(map(str, operands.DIMS))} values, not {dim}"
    return None


def attend(
    queries: mx.array,
    stored: Stored,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
    *,
    negligible: float = _NEGLIGIBLE,
) -> mx.array:
    """Return softmax(scale·q·kᵀ + mask)·v over everything *stored*; the contract is reference.attend's.

    Some tokens of *stored* must be packed. A query to which the mask shows nothing gets zeros.

    Args:
        queries: (n_heads, L, dim_k).
        stored: one sequence of one layer.
        scale: factor of the scores.
        mask: None for causal, or boolean or additive, broadcastable to (n_heads, L, T).
        sinks: learned sink logits of shape (n_heads,), or None.
        negligible: how much weight, as a share of the largest, tokens may have together without their values
            being read; their weights count all the same.
    """
    layout = stored.layout
    n_heads, new_tokens, _ = queries.shape
    n_kv = stored.n_kv_heads
    n_queries = n_heads // n_kv * new_tokens

    keys = None if layout.k is FP16 else stored.keys
    asked = _asked(queries, stored, keys, scale * _LOG2E)
    tiles = -(-stored.packed_to // TILE) - stored.packed_from // TILE
    in_full = stored.length - stored.packed_to + stored.packed_from
    packed_blocks = max(1, min(_MAX_BLOCKS, tiles // _TILES_A_BLOCK))
    plain_blocks = min(_PLAIN_BLOCKS, -(-in_full // TILE))
    blocks = packed_blocks + plain_blocks
    sizes = operands.sizes(
        stored.length,
        stored.packed_from,
        stored.packed_to,
        packed_blocks,
        plain_blocks,
        n_queries,
        new_tokens,
        stored.dropped,
        asked.pairs,
        packed_blocks if layout.v is not FP16 else 0,
    )
    offsets = operands.nothing()
    if asked.pairs and keys is not None and keys.rotary is not None:
        offsets = keys.rotary.turns(TILE)
    at_once = min(2, n_queries)  # query vectors of a SIMD-group: more would not fit its registers
    sums, states = sources.attend_kernel()(
        inputs=[
            sizes,
            asked.packed,
            asked.plain,
            stored.tiles,
            operands.or_empty(stored.k.head, queries.dtype),
            operands.or_empty(stored.k.tail, queries.dtype),
            operands.or_empty(stored.v.head, queries.dtype),
            operands.or_empty(stored.v.tail, queries.dtype),
            operands.centroids(layout.k, layout.dim_k),
            operands.centroids(layout.v, layout.dim_v),
            _rows(mask, stored.length),
            asked.coefficients,
            asked.constants,
            operands.angles(keys, stored.packed_positions[1]),
            offsets,
            negligible / stored.length,
        ],
        template=[
            ("DIM_K", layout.dim_k),
            ("DIM_V", layout.dim_v),
            ("K_HALF_BITS", operands.half_bits(layout.k)),
            ("V_HALF_BITS", operands.half_bits(layout.v)),
            ("K_TRELLIS", layout.dim_k if layout.k.trellis else 0),
            ("V_TRELLIS", layout.dim_v if layout.v.trellis else 0),
            ("QUERIES", at_once),
            ("MASK", 0 if mask is None else 1 if mask.dtype == mx.bool_ else 2),
            ("ROTARY", asked.pairs > 0),
        ],
        grid=(32, blocks, n_kv * -(-n_queries // at_once)),
        threadgroup=(32, _SIMDGROUPS, 1),
        output_shapes=[(n_kv * n_queries, blocks, layout.dim_v), (n_kv * n_queries, blocks, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    turned = layout.v is not FP16
    basis = rotation.basis(layout.dim_v, "v", inverse=True) if turned else operands.nothing()
    (out,) = sources.merge_kernel()(
        inputs=[sizes, sums, states, operands.nothing() if sinks is None else _base_2(sinks), basis],
        template=[
            ("DIM_V", layout.dim_v), ("SINKS", sinks is not None), ("TURNED", turned),
            ("T", queries.dtype),
        ],
        grid=(32, _MERGING, n_kv * n_queries),
        threadgroup=(32, _MERGING, 1),
        output_shapes=[(n_heads, new_tokens, layout.dim_v)],
        output_dtypes=[queries.dtype],
    )  # fmt: skip
    return out


class _Asked(NamedTuple):
    """Query vectors, float32 (KV heads · queries, D): for packed keys, and as they are; and what they ask of a mean.

    *coefficients* of the angles of *pairs* of channels, as wide as a vector, and *constants*, one each.
    """

    packed: mx.array
    plain: mx.array
    coefficients: mx.array
    constants: mx.array
    pairs: int


def _asked(queries: mx.array, stored: Stored, keys: KeyTransform | None, factor: float) -> _Asked:
    """Return *queries* (n_heads, L, D), times *factor*, as the first pass wants them; packed keys went through *keys*."""
    n_heads, new_tokens, dim = queries.shape
    rows = n_heads * new_tokens
    turned = stored.layout.k is not FP16
    lost = operands.lost(keys, dim)
    threads = -(-dim // 32) * 32
    made = sources.turn_kernel()(
        inputs=[
            queries, rotation.basis(dim, "k", inverse=False) if turned else operands.nothing(),
            lost.scale, lost.mean, lost.channels, lost.pairs, factor,
        ],
        template=[
            ("DIM", dim), ("GROUPED", rows // stored.n_kv_heads), ("NEW", new_tokens),
            ("TURNED", turned), ("SCALED", lost.scaled), ("MEAN", lost.has_mean),
        ],
        grid=(threads, 1, rows),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, dim), (rows, dim), (rows, dim), (max(rows, 8),)],
        output_dtypes=[mx.float32] * 4,
    )  # fmt: skip
    packed, plain, coefficients, constants = made
    return _Asked(packed, plain, coefficients, constants, lost.pairs)


def _rows(mask: mx.array | None, length: int) -> mx.array:
    """Return *mask* as (1 or n_heads, 1 or L, length)."""
    if mask is None:
        return operands.nothing()
    mask = mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
    return mx.contiguous(mx.broadcast_to(mask, (*mask.shape[:2], length)))


def _base_2(logits: mx.array) -> mx.array:
    return logits.astype(mx.float32) * _LOG2E
