"""Attention of many query tokens on Metal: all keys and values as the model made them, and MLX's own attention over those.

What a prompt's chunk attends to is in full precision for a moment, in one layer, made by one kernel a side
(restore.metal); why so is in docs/adr/0023-prompts-on-a-gpu.md.
"""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import mlx.core as mx

from daemon.kernels import reference, rotation
from daemon.kernels.case import Case
from daemon.kernels.keys import KeyTransform
from daemon.kernels.metal import operands, sources
from daemon.kernels.metal.attending import unread
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16

_SLOTS = 16  # of a tile, that a threadgroup unpacks


def refusal(case: Case) -> str | None:
    """Return why no kernel unpacks what *case* attends to, in words for the status; None: one does."""
    return unread(case)


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
    if kind is FP16:
        return raw.joined().astype(dtype)
    keys = stored.keys if side == "k" else None
    mean = None if keys is None else keys.mean
    rotary = None if keys is None or mean is None else keys.rotary
    codes, scales = (
        (0, layout.k_words + layout.v_words)
        if side == "k"
        else (layout.k_words, layout.words - layout.v_scale_words)
    )
    (out,) = sources.restore_kernel()(
        inputs=[
            operands.sizes(
                stored.length, stored.packed_from, stored.packed_to, stored.dropped,
                0 if rotary is None else len(rotary.first), 0, 0, 0,
            ),
            stored.tiles,
            operands.or_empty(raw.head, dtype),
            operands.or_empty(raw.tail, dtype),
            operands.centroids(kind, dim),
            _basis(dim, side),
            operands.nothing() if keys is None else mx.contiguous(keys.scale),
            operands.nothing() if mean is None else mx.contiguous(mean),
            operands.nothing().astype(mx.int32) if keys is None else _channels(keys, dim),
            operands.nothing() if rotary is None else rotary.table(0, stored.packed_positions[1]),
        ],
        template=[
            ("DIM", dim), ("HALF_BITS", operands.half_bits(kind)),
            ("TRELLIS", dim if kind.trellis else 0), ("CODES", codes), ("SCALES", scales),
            ("SCALED", keys is not None), ("MEAN", mean is not None),
            ("CLIPS", dtype == mx.float16), ("T", dtype),
        ],
        grid=(256, -(-stored.length // _SLOTS), stored.n_kv_heads),
        threadgroup=(256, 1, 1),
        output_shapes=[(stored.n_kv_heads, stored.length, dim)],
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
