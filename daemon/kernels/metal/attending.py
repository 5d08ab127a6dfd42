"""Attention over packed keys and values in Metal kernels: what Apple GPUs run when a few tokens attend.

Two passes of online softmax over the canonical tiles, which are read as they are: attend.metal gives
partial results of blocks of tokens, merge.metal puts them together. Queries are rotated, and what came
from packed values is rotated back, by ordinary operations around them.
"""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels import codec
from daemon.kernels.case import Case
from daemon.kernels.keys import KeyTransform, Rotary
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

    plain = queries.astype(mx.float32).reshape(n_kv, n_queries, layout.dim_k) * (scale * _LOG2E)
    packed = _in_packed_basis(plain, stored)
    bias = _Bias.of(plain, stored.keys if layout.k is not FP16 else None)
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
        bias.pairs,
        packed_blocks if layout.v is not FP16 else 0,
    )
    angles, offsets = bias.tables(*stored.packed_positions)
    at_once = min(2, n_queries)  # query vectors of a SIMD-group: more would not fit its registers
    sums, states = sources.attend_kernel()(
        inputs=[
            sizes,
            mx.contiguous(packed),
            mx.contiguous(plain),
            stored.tiles,
            operands.or_empty(stored.k.head, queries.dtype),
            operands.or_empty(stored.k.tail, queries.dtype),
            operands.or_empty(stored.v.head, queries.dtype),
            operands.or_empty(stored.v.tail, queries.dtype),
            operands.centroids(layout.k, layout.dim_k),
            operands.centroids(layout.v, layout.dim_v),
            mx.contiguous(_rows(mask, stored.length)),
            bias.coefficients,
            mx.contiguous(bias.constants),
            angles,
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
            ("ROTARY", bias.pairs > 0),
        ],
        grid=(32, blocks, n_kv * -(-n_queries // at_once)),
        threadgroup=(32, _SIMDGROUPS, 1),
        output_shapes=[(n_kv * n_queries, blocks, layout.dim_v), (n_kv * n_queries, blocks, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    (out,) = sources.merge_kernel()(
        inputs=[sizes, sums, states, operands.nothing() if sinks is None else _base_2(sinks)],
        template=[("DIM_V", layout.dim_v), ("SINKS", sinks is not None)],
        grid=(32, _MERGING, n_kv * n_queries),
        threadgroup=(32, _MERGING, 1),
        output_shapes=[(2, n_heads, new_tokens, layout.dim_v)],
        output_dtypes=[mx.float32],
    )
    whole = out[1] if layout.v is FP16 else codec.unrotate(out[0], layout.v, "v") + out[1]
    return whole.astype(queries.dtype)


class _Bias:
    """What packed keys have lost and queries give back: *constants* for each, or *coefficients* of a rotating mean.

    *pairs* of channels rotate; 0 where there is no rotating mean.
    """

    def __init__(
        self, coefficients: mx.array, constants: mx.array, rotary: Rotary | None = None
    ) -> None:
        self.coefficients = coefficients
        self.constants = constants
        self._rotary = rotary
        self.pairs = 0 if rotary is None else len(rotary.first)

    @staticmethod
    def of(queries: mx.array, keys: KeyTransform | None) -> _Bias:
        """Return the bias of *queries* (H, N, dim)."""
        if keys is None or keys.mean is None:
            return _Bias(operands.nothing(), mx.zeros(queries.shape[:2]))
        if keys.rotary is None:
            return _Bias(operands.nothing(), mx.sum(queries * keys.mean[:, None], axis=-1))
        pairs, half = len(keys.rotary.first), queries.shape[-1] // 2
        parts = keys.rotary.coefficients(queries, keys.mean)
        around = [(0, 0), (0, 0), (0, half - pairs)]
        coefficients = mx.concatenate(
            [mx.pad(parts[..., :pairs], around), mx.pad(parts[..., pairs : 2 * pairs], around)],
            axis=-1,
        )
        plain = parts[..., 2 * pairs :]
        constants = plain[..., 0] if keys.rotary.plain else mx.zeros(queries.shape[:2])
        return _Bias(coefficients, constants, keys.rotary)

    def tables(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Return the table of angles at all positions up to *end*, and the one within a tile."""
        if self._rotary is None:
            return operands.nothing(), operands.nothing()
        return self._rotary.table(0, end), self._rotary.turns(TILE)


def _in_packed_basis(queries: mx.array, stored: Stored) -> mx.array:
    if stored.layout.k is FP16:
        return queries
    if stored.keys is not None:
        queries = stored.keys.scaled(queries)
    return codec.rotate(queries, stored.layout.k, "k")


def _rows(mask: mx.array | None, length: int) -> mx.array:
    """Return *mask* as (1 or n_heads, 1 or L, length)."""
    if mask is None:
        return operands.nothing()
    mask = mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
    return mx.broadcast_to(mask, (*mask.shape[:2], length))


def _base_2(logits: mx.array) -> mx.array:
    return logits.astype(mx.float32) * _LOG2E
