"""Attention of many query tokens on the GPU: all keys and values as the model made them, and MLX's own attention over those.

A prompt's chunk attends to everything before it, so what a side's history is in full precision lasts for a
moment, in one layer. It is made in one node (restore.cuh): in plain operations it would be a dozen for every
thousand tokens.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import mlx.core as mx

from daemon.kernels import reference
from daemon.kernels.case import Case
from daemon.kernels.cuda import operands, plan, sources
from daemon.kernels.cuda.launch import spans_of
from daemon.kernels.cuda.layer import on_device
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16


def refusal(case: Case) -> str | None:
    """Return why no CUDA kernel unpacks what *case* attends to, in words for the status; None: one does."""
    return plan.unread(case)


def attend(
    queries: mx.array, stored: Stored, scale: float, mask: mx.array | None, sinks: mx.array | None
) -> mx.array:
    """Attend from *queries* to everything *stored*, some of it packed; the contract is reference.attend's."""
    keys, values = restored(stored, "k", queries.dtype), restored(stored, "v", queries.dtype)
    return reference.sdpa(queries, keys, values, scale, mask, sinks)


def restored(stored: Stored, side: Side, dtype: mx.Dtype) -> mx.array:
    """Return all keys, or all values, of *stored* as the model made them: (H, T, D) of *dtype*."""
    layout, raw = stored.layout, stored.k if side == "k" else stored.v
    kind, dim = (layout.k, layout.dim_k) if side == "k" else (layout.v, layout.dim_v)
    if kind == FP16:
        return raw.joined().astype(dtype)
    keys = stored.keys if side == "k" else None
    codes_at, scales_at = (
        (0, layout.k_words + layout.v_words)
        if side == "k"
        else (layout.k_words, layout.words - layout.v_scale_words)
    )
    span = (stored.length, stored.packed_from, stored.packed_to, stored.dropped)
    head, tail = operands.either(raw, dtype)
    nothing = operands.nothing(mx.float32)
    lost = operands.lost(stored) if keys is not None else operands.no_keys()
    (out,) = sources.restore_kernel()(
        inputs=[
            stored.tiles, spans_of((span,)), head, tail,
            operands.levels(kind, dim), operands.basis(dim, side, inverse=True),
            nothing if lost.scale is None else lost.scale, lost.mean,
            _channels(keys, dim), lost.table,
        ],
        template=[
            ("DIM", dim), ("HALVES", int(2 * kind.bits)), ("IS_TRELLIS", kind.trellis),
            ("ORDER", layout.order), ("KEYS", side == "k"), ("CODES_AT", codes_at),
            ("SCALES_AT", scales_at), ("SCALED", lost.scale is not None),
            ("HAS_MEAN", keys is not None and keys.mean is not None),
            ("N_PAIRS", lost.n_pairs), ("WIDTH", lost.width), ("X", head.dtype), ("T", dtype),
        ],
        grid=(-(-stored.length // TILE) * plan.SCAN_THREADS, stored.n_kv_heads, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(stored.n_kv_heads, stored.length, dim)],
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
