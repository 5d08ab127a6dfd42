"""Encoding on Metal: rounding and packing of whole tiles in one kernel."""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels import codec
from daemon.kernels.metal import operands, sources
from daemon.kernels.packing import TILE, TileLayout


def encoding_refusal(layout: TileLayout) -> str | None:
    """Return why these kernels cannot encode into *layout*; None: they can."""
    for kind, dim in ((layout.k, layout.dim_k), (layout.v, layout.dim_v)):
        if kind.affine:
            return f"Metal kernels do not write {kind.name}"
        if dim > operands.DIMS[-1] or dim % 16:
            return f"Metal kernels do not encode vectors of {dim} values"
    return None


def tiles(
    k: mx.array | None,
    v: mx.array | None,
    layout: TileLayout,
    *,
    first: int,
    old: mx.array | None,
) -> mx.array:
    """Return the tiles that hold *k* and *v* from slot *first* on; the contract is encode.tiles'.

    Codes and scales are the reference's except where the order of a sum decides: a coordinate on a
    threshold, two stretches with one angle, a scale between two fp16 numbers.
    """
    given = k if k is not None else v
    assert given is not None, "there is nothing to encode"
    n_kv, count, _ = given.shape
    n_tiles = -(-(first + count) // TILE)
    (made,) = sources.encode_kernel()(
        inputs=[
            operands.sizes(first, count, int(old is not None), 0, 0, 0, 0, 0),
            operands.nothing() if k is None else mx.contiguous(codec.rotate(k, layout.k, "k")),
            operands.nothing() if v is None else mx.contiguous(codec.rotate(v, layout.v, "v")),
            operands.thresholds(layout.k, layout.dim_k),
            operands.thresholds(layout.v, layout.dim_v),
            operands.centroids(layout.k, layout.dim_k),
            operands.centroids(layout.v, layout.dim_v),
            operands.stretches(),
            operands.empty(mx.uint32) if old is None else old,
        ],
        template=[
            ("STRETCHES", len(codec.STRETCHES)),
            ("DIM_K", layout.dim_k),
            ("DIM_V", layout.dim_v),
            ("K_HALF_BITS", operands.half_bits(layout.k)),
            ("V_HALF_BITS", operands.half_bits(layout.v)),
            ("K_TRELLIS", layout.k.trellis),
            ("V_TRELLIS", layout.v.trellis),
        ],
        grid=(256, n_tiles, n_kv),
        threadgroup=(256, 1, 1),
        output_shapes=[(n_kv, n_tiles, layout.words)],
        output_dtypes=[mx.uint32],
    )
    return made
