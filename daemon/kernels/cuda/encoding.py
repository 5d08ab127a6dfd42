"""Encoding of whole tiles on the GPU, in one node: rotation, rounding and packing."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from daemon.kernels import codebook, codec, order, rotation
from daemon.kernels.backend import computed
from daemon.kernels.cuda import rounding, sources
from daemon.kernels.cuda.launch import words_of
from daemon.kernels.packing import TILE, TileLayout
from daemon.kernels.rotation import Side
from daemon.policy.schemes import INT8, Codec

_THREADS = 256


def encoding_refusal(layout: TileLayout) -> str | None:
    """Return why tiles of *layout* are not encoded here, in words for the status; None: they are."""
    if layout.order != order.FRAGMENTS:
        return "the CUDA kernels encode only what their tensor-core kernel reads"
    return None


def tiles(k: mx.array, v: mx.array, layout: TileLayout, *, first: int) -> mx.array:
    """Return the tiles that hold *k* and *v* from slot *first* on; the contract is encode.tiles', with nothing kept."""
    n_kv, count, dim = k.shape
    n_tiles = -(-(first + count) // TILE)
    (out,) = sources.encode_kernel()(
        inputs=[
            k, v, _signs(dim, "k"), _signs(dim, "v"), numbers(layout.k, dim),
            numbers(layout.v, dim), words_of(((first, 0, 0, 0),)),
        ],
        template=[
            ("DIM", dim), ("K_BITS", int(layout.k.bits)), ("V_BITS", int(layout.v.bits)),
            ("K_LEVELS", levels(layout.k)), ("V_LEVELS", levels(layout.v)),
            ("STRETCHES", len(codec.STRETCHES)), ("K", k.dtype), ("V", v.dtype),
        ],
        grid=(n_tiles * _THREADS, n_kv, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(n_kv, n_tiles, layout.words)],
        output_dtypes=[mx.uint32],
    )  # fmt: skip
    encoded: mx.array = out
    return encoded


def levels(kind: Codec) -> int:
    """Return how many centroids *kind* has for the kernels that round; int8 is rounded without any."""
    return 2 if kind == INT8 else codebook.levels(kind.bits)


@cache
def numbers(kind: Codec, dim: int) -> mx.array:
    """Return what rounding to *kind* has to know (daemon.kernels.cuda.rounding), in the memory of the GPU."""
    return rounding.numbers(2 if kind == INT8 else kind.bits, dim, codec.STRETCHES)


@cache
def _signs(dim: int, side: Side) -> mx.array:
    signs = rotation.signs(dim, side)
    return computed(signs)
