"""All keys or values of a row as the model made them, in one node on the GPU (restore.cuh): what prompts attend to."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import mlx.core as mx

from daemon.kernels.cuda import operands, plan, sources
from daemon.kernels.cuda.launch import spans_of
from daemon.kernels.cuda.layer import on_device
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE
from daemon.kernels.restoring import Restoring
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16


def restored(stored: Stored, side: Side, dtype: mx.Dtype) -> mx.array:
    """Return all keys, or all values, of *stored* as the model made them: (H, T, D) of *dtype*."""
    of, raw = stored.layout.side(side), stored.k if side == "k" else stored.v
    if of.codec is FP16:
        return raw.joined().astype(dtype)
    keys = stored.keys if side == "k" else None
    span = (stored.length, stored.packed_from, stored.packed_to, stored.dropped)
    head, tail = operands.either(raw, dtype)
    nothing = operands.nothing(mx.float32)
    lost = operands.lost(stored) if keys is not None else operands.no_keys()
    (out,) = sources.restore_kernel()(
        inputs=[
            stored.tiles, spans_of((span,)), head, tail,
            operands.levels(of.codec, of.dim), operands.basis(of.dim, side, inverse=True),
            nothing if lost.scale is None else lost.scale, lost.mean,
            _channels(keys, of.dim), lost.table,
        ],
        template=[
            ("DIM", of.dim), ("HALVES", int(2 * of.codec.bits)), ("IS_TRELLIS", of.codec.trellis),
            ("ORDER", stored.layout.order), ("KEYS", side == "k"), ("CODES_AT", of.codes_at),
            ("SCALES_AT", of.scales_at), ("SCALED", lost.scale is not None),
            ("HAS_MEAN", keys is not None and keys.mean is not None),
            ("N_PAIRS", lost.n_pairs), ("WIDTH", lost.width), ("X", head.dtype), ("T", dtype),
        ],
        grid=(-(-stored.length // TILE) * plan.SCAN_THREADS, stored.n_kv_heads, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(stored.n_kv_heads, stored.length, of.dim)],
        output_dtypes=[dtype],
    )  # fmt: skip
    whole: mx.array = out
    return whole


_CHANNELS: WeakKeyDictionary[KeyTransform, mx.array] = WeakKeyDictionary()


def _channels(keys: KeyTransform | None, dim: int) -> mx.array:
    if keys is None:
        return operands.no_keys().pairs
    if keys not in _CHANNELS:
        _CHANNELS[keys] = on_device(keys.partners(dim))
    return _CHANNELS[keys]


prompts = Restoring(restored, plan.unread)
