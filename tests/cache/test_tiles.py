"""The buffer of a row's tiles grows rarely, never by much, and never beyond what memory was planned for."""

from __future__ import annotations

import mlx.core as mx
import pytest

from daemon.cache.tiles import put
from daemon.kernels.packing import TILE
from daemon.policy.budget import spare_tiles


def filled(count: int, step: int, place: int) -> list[int]:
    """Return the room after each *step* of tiles up to *count*."""
    tiles, rooms = None, []
    for at in range(0, count, step):
        tiles = put(tiles, mx.full((1, step, 2), at, dtype=mx.uint32), at, place)
        rooms.append(tiles.shape[1])
    assert tiles is not None
    assert [tiles[0, at, 0].item() for at in range(0, count, step)] == list(range(0, count, step))
    return rooms


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("step", [1, 3, 64])
def test_room_is_never_more_than_what_is_planned_for(step: int, place: int) -> None:
    rooms = filled(400, step, place)
    used = range(step, 400 + step, step)
    assert all(room <= end + spare_tiles(end) for room, end in zip(rooms, used, strict=False))


def test_growing_is_rare_and_layers_do_not_all_grow_at_once() -> None:
    grown = []
    for place in range(4):
        rooms = filled(400, 1, place)
        grown.append({at for at, room in enumerate(rooms[1:]) if room != rooms[at]})
    assert all(len(steps) <= 25 for steps in grown)
    assert len(set.intersection(*grown)) <= 2


def test_long_rows_make_room_for_a_thousand_tokens_or_so() -> None:
    for place in range(4):
        assert 600 < spare_tiles(4096, place) * TILE < 1200
