"""The tiles of a row in one buffer, which grows so rarely that copying it does not count."""

from __future__ import annotations

import mlx.core as mx

from daemon.cache.side import written

_LEAST_SLACK = 8  # tiles
_PLACES = 4  # that a layer can have among those that grow at different times


def put(tiles: mx.array | None, new: mx.array, at: int, place: int) -> mx.array:
    """Return *tiles* (H, capacity, words) with *new* ones (H, n, words) from tile *at* on, in place where nobody else holds them.

    *place* is the layer's number in its model.
    """
    end = at + new.shape[1]
    if tiles is None or end > tiles.shape[1]:
        shape = (new.shape[0], end + _slack(end, place) - at, new.shape[2])
        spare = mx.zeros(shape, dtype=mx.uint32)
        tiles = spare if tiles is None else mx.concatenate([tiles[:, :at], spare], axis=1)
    return written(tiles, new, at)


def _slack(tiles: int, place: int) -> int:
    """Return for how many more than *tiles* to make room: about a quarter of them, by the layer's place.

    A part of a model's layers grow in one step: all at once need twice the memory for a moment, and one by one make
    every fold another graph for CUDA to prepare.
    """
    return max(_LEAST_SLACK, tiles // 4) * (_PLACES + place % _PLACES) // (_PLACES + 2)
