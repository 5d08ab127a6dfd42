"""Keys and values in full precision to whole tiles."""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels import codec, order, packing
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE, Packed, TileLayout
from daemon.kernels.rotation import Side
from daemon.policy.schemes import Codec

Coded = tuple[mx.array, mx.array]


def tiles(
    keys: mx.array | None,
    values: mx.array | None,
    layout: TileLayout,
    transform: KeyTransform | None,
    position: int,
    *,
    unused: int = 0,
    old: Packed | None = None,
) -> mx.array:
    """Return tiles of *keys* (H, n, dim_k) and *values* (H, n, dim_v), uint32 (H, tiles, words).

    Slots before and after the tokens are zero.

    Args:
        keys: of the tokens from *position* on, as the model computed them; None: a side that is not packed.
        values: of the same tokens; None likewise.
        layout: that of the tiles.
        transform: what is taken off keys.
        position: at which the first token was computed.
        unused: slots before the first token.
        old: what comes before the first token in its tile, unpacked, where that is anything.
    """
    if old is None and keys is not None and values is not None:
        made = _in_one_node(keys, values, layout, transform, position, unused)
        if made is not None:
            return made
    if keys is not None and transform is not None:
        keys = transform.centered(keys, position)
    packed = Packed(
        k=_side(keys, layout.k, "k", unused, old.k if old else None),
        v=_side(values, layout.v, "v", unused, old.v if old else None),
    )
    return packing.pack(packed, layout)


def _in_one_node(
    keys: mx.array,
    values: mx.array,
    layout: TileLayout,
    transform: KeyTransform | None,
    position: int,
    unused: int,
) -> mx.array | None:
    """Return the tiles if there is a kernel that makes them on this device."""
    if layout.order != order.FRAGMENTS or not packing.on_cuda():
        return None
    from daemon.kernels.cuda import (
        encoding,
    )  # imports MLX's CUDA kernels, which other devices have not

    return encoding.tiles(keys, values, layout, transform, position, unused)


def _side(
    vectors: mx.array | None, kind: Codec, name: Side, unused: int, old: Coded | None
) -> Coded | None:
    """Encode the vectors of one side, put *old* before them, and fill up to whole tiles."""
    if vectors is None:
        return None
    codes, scales = codec.encode(vectors, kind, name)
    if old is not None:
        codes = mx.concatenate([old[0], codes], axis=1)
        scales = mx.concatenate([old[1], scales], axis=1)
    spare = -(codes.shape[1] + unused) % TILE
    around = [(0, 0), (unused, spare)]
    return (
        mx.pad(codes, [*around, (0, 0)]),
        mx.pad(scales, around + [(0, 0)] * (scales.ndim - 2)),
    )
