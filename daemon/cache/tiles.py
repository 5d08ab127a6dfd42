"""The tiles of a row in one buffer, which grows so rarely that copying it does not count."""

from __future__ import annotations

import mlx.core as mx

from daemon.cache.side import written
from daemon.policy.budget import spare_tiles


def put(tiles: mx.array | None, new: mx.array, at: int, place: int) -> mx.array:
    """Return *tiles* (H, capacity, words) with *new* ones (H, n, words) from tile *at* on, in place where nobody else holds them.

    *place* is the layer's number in its model.
    """
    end = at + new.shape[1]
    if tiles is None or end > tiles.shape[1]:
        shape = (new.shape[0], end + spare_tiles(end, place) - at, new.shape[2])
        spare = mx.zeros(shape, dtype=mx.uint32)
        tiles = spare if tiles is None else mx.concatenate([tiles[:, :at], spare], axis=1)
    return written(tiles, new, at)
