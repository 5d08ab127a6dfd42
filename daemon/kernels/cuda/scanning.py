"""Calls of the general kernel (scan.cuh): three nodes for one row, of every case that the fast kernel leaves."""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels import rotation
from daemon.kernels.cuda import operands, plan, sources
from daemon.kernels.cuda.layer import bits_of
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16


def scan(
    queries: mx.array,
    spans: mx.array,
    stored: Stored,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend from *queries* (n_heads, L, D) of one row, whose words are *spans*, to what it has *stored*."""
    layout, n_kv = stored.layout, stored.n_kv_heads
    n_heads, length, _ = queries.shape
    grouped = n_heads // n_kv
    k_packed, v_packed = layout.k != FP16, layout.v != FP16
    keys = operands.lost(
        stored.keys if k_packed else None, layout.dim_k, stored.packed_positions[1]
    )
    shared = plan.scan_shared_bytes(layout.dim_k, layout.dim_v, keys.width)
    blocks = plan.scan_blocks(grouped, length)
    splits = plan.scan_splits(n_kv, blocks, stored.length)
    k_head, k_tail = operands.either(stored.k, queries.dtype)
    v_head, v_tail = operands.either(stored.v, queries.dtype)
    inputs = [
        queries,
        _turned(queries, stored, keys) if k_packed else operands.nothing(mx.float32),
        stored.tiles, spans, k_head, k_tail, v_head, v_tail,
        operands.levels(layout.k, layout.dim_k), operands.levels(layout.v, layout.dim_v),
        keys.mean, keys.pairs, keys.plain, keys.table,
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
            ("QUERIES", length), ("N_PAIRS", keys.n_pairs), ("N_PLAIN", keys.n_plain),
            ("SCALE", bits_of(scale)), ("SHARED", shared), ("Q", queries.dtype),
            ("K", k_head.dtype), ("V", v_head.dtype),
        ],
        grid=(splits * blocks * plan.SCAN_THREADS, n_kv, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(splits, rows * 2 * (layout.dim_v + 1))],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    # sums of values that are not packed are in the model's basis, and no others are there
    matrix = (
        rotation.basis(layout.dim_v, "v", inverse=True)
        if v_packed
        else operands.nothing(mx.float32)
    )
    (out,) = sources.merge_kernel(turned=v_packed, sinks=sinks is not None)(
        inputs=[sums, matrix] if sinks is None else [sums, matrix, sinks],
        template=[
            ("DIM_V", layout.dim_v), ("HEADS", n_heads), ("QUERIES", length),
            ("L", mx.float32 if sinks is None else sinks.dtype), ("T", queries.dtype),
        ],
        grid=(rows * plan.SCAN_THREADS, 1, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(n_heads, length, layout.dim_v)],
        output_dtypes=[queries.dtype],
    )  # fmt: skip
    attended: mx.array = out
    return attended


def _turned(queries: mx.array, stored: Stored, keys: operands.Lost) -> mx.array:
    """Return *queries* as packed keys want them: scaled per channel, and in the stored basis; float32."""
    n_heads, length, dim = queries.shape
    inputs = [queries, rotation.basis(dim, "k", inverse=False)]
    if keys.scale is not None:
        inputs.append(keys.scale)
    (out,) = sources.turn_kernel(scaled=keys.scale is not None)(
        inputs=inputs,
        template=[
            ("DIM_K", dim), ("GROUPED", n_heads // stored.n_kv_heads), ("QUERIES", length),
            ("Q", queries.dtype),
        ],
        grid=(n_heads * length * plan.SCAN_THREADS, 1, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    turned: mx.array = out
    return turned


def _added(mask: mx.array, queries: int, length: int) -> mx.array:
    """Return *mask* as numbers to add, float32 (1 or n_heads, queries, length)."""
    if mask.dtype == mx.bool_:
        mask = mx.where(mask, 0.0, -mx.inf)
    mask = mask.astype(mx.float32)
    heads = mask.shape[0] if mask.ndim == 3 else 1
    return mx.contiguous(mx.broadcast_to(mask, (heads, queries, length)))
