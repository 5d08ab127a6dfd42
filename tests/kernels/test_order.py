from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import order, packing
from daemon.kernels.packing import Packed, TileLayout
from daemon.policy.schemes import FP16, INT8, TURBO2, TURBO3, TURBO3_5, TURBO4, TURBO5, Codec

CODECS = (INT8, TURBO5, TURBO4, TURBO3, TURBO2)
DIMS = (64, 128, 192)


def fragment_code(words: list[int], side: str, bits: int, dim: int, t: int, d: int) -> int:
    """Read one code from a side's words in fragments, straight from the ADR: the oracle."""
    if side == "k":
        lane, n = t % 8 * 4 + d // (dim // 4), t // 8 * (dim // 4) + d % (dim // 4)
        group, register, byte = n // 32, n % 32 // 4, n % 4
    else:
        lane, group, byte = d % 8 * 4 + t % 8 // 2, d // 32, t // 8
        register = d // 16 % 2 * 4 + d // 8 % 2 * 2 + t % 2
    held = dim // 32 * bits
    width = 4 if held % 4 == 0 else 2 if held % 2 == 0 else 1

    def word(index: int) -> int:
        at = group * bits + index
        return words[(at // width * 32 + lane) * width + at % width]

    half, nibble = register // 2, 16 * (register % 2) + 4 * byte
    sign_at = 8 * byte + (3 if register % 2 else 7)
    if bits == 8:
        return word(register) >> 8 * byte & 255
    if bits == 4:
        magnitude, negative = word(half) >> nibble & 7, word(half) >> sign_at & 1
        return 7 - magnitude if negative else 8 + magnitude
    if bits == 5:
        magnitude = (word(half) >> nibble & 7) * 2 + (word(4) >> 8 * byte + 7 - register & 1)
        return 15 - magnitude if word(half) >> sign_at & 1 else 16 + magnitude
    if bits == 3:
        if half < 3:
            return word(half) >> nibble & 7
        return sum((word(k) >> nibble + 3 & 1) << k for k in range(3))
    return word(half // 2) >> nibble + 2 * (half % 2) & 3


def random_side(seed: int, codec: Codec, dim: int) -> tuple[mx.array, mx.array]:
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 2 ** int(codec.bits), (2, 96, dim), dtype=np.uint8)
    return mx.array(codes), mx.array(generator.random((2, 96)).astype(np.float16))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_fragments_hold_each_code_where_the_adr_says(codec: Codec, dim: int) -> None:
    layout = TileLayout(codec, codec, dim, dim, order.FRAGMENTS)
    k, v = random_side(dim, codec, dim), random_side(dim + 1, codec, dim)
    tile = np.array(packing.pack(Packed(k, v), layout))[1, 2].tolist()
    bits = int(codec.bits)
    sides = {
        "k": (tile[: layout.side("v").codes_at], k),
        "v": (tile[layout.side("v").codes_at :], v),
    }
    for side, (words, (codes, _)) in sides.items():
        want = np.array(codes)[1, 64:]
        for t in range(32):
            for d in range(t % 3, dim, 3):
                assert fragment_code(words, side, bits, dim, t, d) == want[t, d], (side, t, d)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_every_bit_of_a_side_is_used_once(codec: Codec, dim: int) -> None:
    bits = int(codec.bits)
    for side in ("k", "v"):
        where = order.places(side, bits, dim)
        taken = np.sort((where.word.astype(np.int64) * 32 + where.bit).ravel())
        assert np.array_equal(taken, np.arange(32 * dim * bits))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("k", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("v", CODECS[2:], ids=lambda codec: codec.name)
def test_tiles_in_fragments_unpack_to_what_was_packed(k: Codec, v: Codec, dim: int) -> None:
    layout = TileLayout(k, v, dim, dim, order.FRAGMENTS)
    packed = Packed(random_side(1, k, dim), random_side(2, v, dim))
    back = packing.unpack(packing.pack(packed, layout), layout)
    for got, want in ((back.k, packed.k), (back.v, packed.v)):
        assert got is not None
        assert want is not None
        assert mx.array_equal(got[0], want[0]).item()
        assert mx.array_equal(got[1], want[1]).item()


def test_reordering_to_canonical_and_back_changes_nothing() -> None:
    layout = TileLayout(TURBO4, TURBO3, 128, 128, order.FRAGMENTS)
    packed = Packed(random_side(1, TURBO4, 128), random_side(2, TURBO3, 128))
    tiles = packing.pack(packed, layout)
    plain = packing.reordered(tiles, layout, order.CANONICAL)
    canonical = TileLayout(TURBO4, TURBO3, 128, 128)
    assert mx.array_equal(plain, packing.pack(packed, canonical)).item()
    assert mx.array_equal(packing.reordered(plain, canonical, order.FRAGMENTS), tiles).item()
    assert packing.reordered(tiles, layout, order.FRAGMENTS) is tiles


def test_scales_lie_where_the_kernels_read_them() -> None:
    layout = TileLayout(TURBO4, TURBO4, 64, 64, order.FRAGMENTS)
    k, v = random_side(3, TURBO4, 64), random_side(4, TURBO4, 64)
    tile = np.array(packing.pack(Packed(k, v), layout))[0, 1]
    halves = tile[layout.side("k").scales_at :].view(np.float16)
    for t in range(32):
        assert halves[t % 8 * 4 + t // 8] == np.array(k[1])[0, 32 + t]
        assert halves[32 + t % 8 * 4 + t // 8] == np.array(v[1])[0, 32 + t]


@pytest.mark.parametrize(
    ("k", "v", "dim"), [(TURBO4, FP16, 128), (TURBO3_5, TURBO4, 128), (TURBO4, TURBO4, 96)]
)
def test_what_cannot_lie_in_fragments_is_refused(k: Codec, v: Codec, dim: int) -> None:
    with pytest.raises(ValueError, match="cannot lie in fragments"):
        TileLayout(k, v, dim, dim, order.FRAGMENTS)
