"""Which arrays a row with a policy has when it is saved: what Row.restored checks."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from daemon.cache.side import RowState, dtype_name
from daemon.kernels.packing import TILE, TileLayout
from daemon.policy.schemes import FP16, Scheme

Shapes = dict[str, tuple[tuple[int, ...], str]]


def shapes_of(arrays: Mapping[str, mx.array]) -> Shapes:
    """Return shape and dtype of each of *arrays*."""
    return {name: (tuple(array.shape), dtype_name(array)) for name, array in arrays.items()}


def expected_shapes(state: RowState, scheme: Scheme, sink_tokens: int) -> Shapes:
    """Return shape and dtype of every array of *state*, if it is of a row with *scheme* and *sink_tokens*."""
    kept = state.length - state.dropped
    some = state.packed_to > sink_tokens
    counts = {}
    for name, kind in (("k", scheme.k), ("v", scheme.v)):
        head = kept if kind is FP16 else min(kept, sink_tokens)
        counts[f"{name}_head"] = head
        counts[f"{name}_tail"] = 0 if kind is FP16 else kept - (state.packed_to if some else head)
    shapes: Shapes = {}
    for name, count in counts.items():
        dim, dtype = (
            (state.dim_k, state.dtype_k) if name[0] == "k" else (state.dim_v, state.dtype_v)
        )
        if count:
            shapes[name] = ((state.n_kv_heads, count, dim), dtype)
    layout = TileLayout(scheme.k, scheme.v, state.dim_k, state.dim_v)
    if some and layout.packed:
        tiles = -(-state.packed_to // TILE)
        shapes["tiles"] = ((state.n_kv_heads, tiles, layout.words), "uint32")
    return shapes
