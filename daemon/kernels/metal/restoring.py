"""All keys or values of a row as the model made them, by one Metal kernel (restore.metal): what prompts attend to."""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import mlx.core as mx

from daemon.kernels import rotation
from daemon.kernels.keys import KeyTransform
from daemon.kernels.metal import operands, sources
from daemon.kernels.metal.attending import unread
from daemon.kernels.restoring import Restoring
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16

_SLOTS = 16  # of a tile, that a threadgroup unpacks


def restored(stored: Stored, side: Side, dtype: mx.Dtype) -> mx.array:
    """Return all keys, or all values, of *stored* as the model made them: (H, T, D) of *dtype*."""
    of, raw = stored.layout.side(side), stored.k if side == "k" else stored.v
    if of.codec is FP16:
        return raw.joined().astype(dtype)
    keys = stored.keys if side == "k" else None
    mean = None if keys is None else keys.mean
    rotary = None if keys is None or mean is None else keys.rotary
    (out,) = sources.restore_kernel()(
        inputs=[
            operands.sizes(
                stored.length, stored.packed_from, stored.packed_to, stored.dropped,
                0 if rotary is None else len(rotary.first), 0, 0, 0,
            ),
            stored.tiles,
            operands.or_empty(raw.head, dtype),
            operands.or_empty(raw.tail, dtype),
            operands.centroids(of.codec, of.dim),
            _basis(of.dim, side),
            operands.nothing() if keys is None else mx.contiguous(keys.scale),
            operands.nothing() if mean is None else mx.contiguous(mean),
            operands.nothing().astype(mx.int32) if keys is None else _channels(keys, of.dim),
            operands.nothing() if rotary is None else rotary.table(0, stored.packed_positions[1]),
        ],
        template=[
            ("DIM", of.dim), ("HALF_BITS", operands.half_bits(of.codec)),
            ("TRELLIS", of.dim if of.codec.trellis else 0), ("CODES", of.codes_at), ("SCALES", of.scales_at),
            ("SCALED", keys is not None), ("MEAN", mean is not None),
            ("CLIPS", dtype == mx.float16), ("T", dtype),
        ],
        grid=(256, -(-stored.length // _SLOTS), stored.n_kv_heads),
        threadgroup=(256, 1, 1),
        output_shapes=[(stored.n_kv_heads, stored.length, of.dim)],
        output_dtypes=[dtype],
    )  # fmt: skip
    return out


@cache
def _basis(dim: int, side: Side) -> mx.array:
    """Return the matrix by which row vectors go out of the stored basis, (dim, dim), float32."""
    matrix = mx.contiguous(rotation.matrix(dim, side).T)
    mx.eval(matrix)
    return matrix


_CHANNELS: WeakKeyDictionary[KeyTransform, mx.array] = WeakKeyDictionary()


def _channels(keys: KeyTransform, dim: int) -> mx.array:
    if keys not in _CHANNELS:
        _CHANNELS[keys] = mx.array(keys.partners(dim))
    return _CHANNELS[keys]


prompts = Restoring(restored, unread)
