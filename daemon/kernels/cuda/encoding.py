"""Encoding of whole tiles on the GPU, in one node: what is taken off keys, rotation, rounding and packing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from daemon.kernels import codebook, codec
from daemon.kernels.cuda import rounding, sources
from daemon.kernels.cuda.launch import Layer, layer_of, spans_of
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE, TileLayout
from daemon.policy.schemes import INT8, Codec

_THREADS = 256


def tiles(
    keys: mx.array,
    values: mx.array,
    layout: TileLayout,
    transform: KeyTransform | None,
    position: int,
    unused: int,
) -> mx.array | None:
    """Return whole tiles of *keys* (H, n, D) and *values*, which are in fragments; None: not with this *transform*.

    Args:
        keys: of the tokens from *position* on, as the model computed them.
        values: of the same shape and dtype.
        layout: in fragments.
        transform: what is taken off keys.
        position: at which the first token was computed.
        unused: slots before it; they and those after the last token become zero.
    """
    n_kv, count, _ = keys.shape
    layer = layer_of(layout, n_kv, transform)
    if layer is None or values.dtype != keys.dtype:
        return None
    n_tiles = -(-(unused + count) // TILE)
    (out,) = sources.encode_kernel()(
        inputs=[
            keys, values, layer.constants, _numbers(layout.k, layout.dim_k),
            _numbers(layout.v, layout.dim_v), spans_of(((unused, position, 0, 0),)),
        ],
        template=_template(layer, keys.dtype),
        grid=(n_tiles * _THREADS, n_kv, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(n_kv, n_tiles, layout.words)],
        output_dtypes=[mx.uint32],
    )  # fmt: skip
    encoded: mx.array = out
    return encoded


def _template(layer: Layer, dtype: mx.Dtype) -> list[tuple[str, Any]]:
    k, v = layer.layout.k, layer.layout.v
    return [
        ("DIM", layer.layout.dim_k), ("K_BITS", int(k.bits)), ("V_BITS", int(v.bits)),
        ("K_LEVELS", _levels(k)), ("V_LEVELS", _levels(v)), ("STRETCHES", len(codec.STRETCHES)),
        ("HAS_MEAN", layer.has_mean), ("N_PAIRS", layer.n_pairs), ("PAIR_STEP", layer.step),
        ("PAIR_GAP", layer.gap), ("T", dtype),
    ]  # fmt: skip


def _levels(kind: Codec) -> int:
    return 2 if kind == INT8 else codebook.levels(kind.bits)


@lru_cache(maxsize=64)
def _numbers(kind: Codec, dim: int) -> mx.array:
    return rounding.numbers(2 if kind == INT8 else kind.bits, dim, codec.STRETCHES)
