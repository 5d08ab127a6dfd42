"""All keys or values of a row as the model made them, in one node on the GPU (restore.cuh): what prompts attend to."""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels import rotation
from daemon.kernels.cuda import operands, plan, sources
from daemon.kernels.cuda.launch import spans_of
from daemon.kernels.packing import TILE
from daemon.kernels.restoring import Restoring
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16


def restored(stored: Stored, side: Side, dtype: mx.Dtype) -> mx.array:
    """Return all keys, or all values, of *stored* as the model made them: (H, T, D) of *dtype*."""
    of, raw = stored.layout.side(side), stored.raw(side)
    if of.codec is FP16:
        return raw.joined().astype(dtype)
    lost = operands.lost(stored.keys if side == "k" else None, of.dim, stored.packed_positions[1])
    span = (stored.length, stored.packed_from, stored.packed_to, stored.dropped)
    head, tail = operands.either(raw, dtype)
    nothing = operands.nothing(mx.float32)
    (out,) = sources.restore_kernel()(
        inputs=[
            stored.tiles, spans_of((span,)), head, tail,
            operands.levels(of.codec, of.dim), rotation.basis(of.dim, side, inverse=True),
            nothing if lost.scale is None else lost.scale, lost.mean,
            lost.partners, lost.table,
        ],
        template=[
            ("DIM", of.dim), ("HALVES", int(2 * of.codec.bits)), ("IS_TRELLIS", of.codec.trellis),
            ("ORDER", stored.layout.order), ("KEYS", side == "k"), ("CODES_AT", of.codes_at),
            ("SCALES_AT", of.scales_at), ("SCALED", lost.scale is not None),
            ("HAS_MEAN", lost.width > 0),
            ("N_PAIRS", lost.n_pairs), ("WIDTH", lost.width), ("X", head.dtype), ("T", dtype),
        ],
        grid=(-(-stored.length // TILE) * plan.SCAN_THREADS, stored.n_kv_heads, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(stored.n_kv_heads, stored.length, of.dim)],
        output_dtypes=[dtype],
    )  # fmt: skip
    whole: mx.array = out
    return whole


prompts = Restoring(restored, plan.unread)
