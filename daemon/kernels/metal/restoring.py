"""All keys or values of a row as the model made them, by one Metal kernel (restore.metal): what prompts attend to."""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels import rotation
from daemon.kernels.metal import operands, sources
from daemon.kernels.metal.attending import unread
from daemon.kernels.restoring import Restoring
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16

_SLOTS = 16  # of a tile, that a threadgroup unpacks


def restored(stored: Stored, side: Side, dtype: mx.Dtype) -> mx.array:
    """Return all keys, or all values, of *stored* as the model made them: (H, T, D) of *dtype*."""
    of, raw = stored.layout.side(side), stored.raw(side)
    if of.codec is FP16:
        return raw.joined().astype(dtype)
    keys = stored.keys if side == "k" else None
    lost = operands.lost(keys, of.dim)
    (out,) = sources.restore_kernel()(
        inputs=[
            operands.sizes(
                stored.length, stored.packed_from, stored.packed_to, stored.dropped,
                lost.pairs, 0, 0, 0,
            ),
            stored.tiles,
            operands.or_empty(raw.head, dtype),
            operands.or_empty(raw.tail, dtype),
            operands.centroids(of.codec, of.dim),
            rotation.basis(of.dim, side, inverse=True),
            lost.scale,
            lost.mean,
            lost.channels,
            operands.angles(keys, stored.packed_positions[1]),
        ],
        template=[
            ("DIM", of.dim), ("HALF_BITS", operands.half_bits(of.codec)),
            ("TRELLIS", of.dim if of.codec.trellis else 0), ("CODES", of.codes_at), ("SCALES", of.scales_at),
            ("SCALED", lost.scaled), ("MEAN", lost.has_mean),
            ("CLIPS", dtype == mx.float16), ("T", dtype),
        ],
        grid=(256, -(-stored.length // _SLOTS), stored.n_kv_heads),
        threadgroup=(256, 1, 1),
        output_shapes=[(stored.n_kv_heads, stored.length, of.dim)],
        output_dtypes=[dtype],
    )  # fmt: skip
    return out


prompts = Restoring(restored, unread)
