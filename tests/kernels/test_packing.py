from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.kernels import packing
from daemon.kernels.packing import TILE, Packed, TileLayout
from daemon.policy.schemes import FP16, INT8, TURBO2, TURBO3, TURBO4, Codec

CODECS = (INT8, TURBO4, TURBO3, TURBO2)
UINT = npt.NDArray[np.uint32]


def unpack_slowly(words: UINT, bits: int) -> list[int]:
    """Read codes from *words* bit by bit, straight from the layout's words: the oracle."""
    codes = []
    for group in words.reshape(-1, bits):
        for i in range(TILE):
            code = shift = at = 0
            for width in (8, 4, 2, 1):
                if not bits & width:
                    continue
                word = int(group[at + i * width // 32])
                code |= (word >> (i * width % 32) & (2**width - 1)) << shift
                shift += width
                at += width
            codes.append(code)
    return codes


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_codes_read_back_bit_by_bit(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, 96).astype(np.uint8)

    words = packing.pack_codes(mx.array(codes), bits)

    assert words.dtype == mx.uint32
    assert words.shape == (96 * bits // 32,)
    assert unpack_slowly(np.array(words), bits) == codes.tolist()


@given(bits=st.integers(1, 8), groups=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_unpack_inverts_pack(bits: int, groups: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, groups * TILE)).astype(np.uint8)

    assert np.array_equal(
        np.array(packing.unpack_codes(packing.pack_codes(mx.array(codes), bits), bits)), codes
    )


def random_side(
    codec: Codec, heads: int, tokens: int, dim: int, seed: int
) -> tuple[mx.array, mx.array] | None:
    if codec is FP16:
        return None
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2 ** int(codec.bits), (heads, tokens, dim)).astype(np.uint8)
    return mx.array(codes), mx.array(rng.random((heads, tokens)).astype(np.float16))


@pytest.mark.parametrize("k", [*CODECS, FP16])
@pytest.mark.parametrize("v", [*CODECS, FP16])
def test_tiles_hold_both_sides(k: Codec, v: Codec) -> None:
    if k is FP16 and v is FP16:
        return
    layout = TileLayout(k, v, 80, 64)
    sides = Packed(k=random_side(k, 3, 64, 80, 1), v=random_side(v, 3, 64, 64, 2))

    tiles = packing.pack(sides, layout)
    back = packing.unpack(tiles, layout)

    assert tiles.shape == (3, 2, layout.words)
    for side, returned in ((sides.k, back.k), (sides.v, back.v)):
        if side is None:
            assert returned is None
        else:
            assert returned is not None
            assert mx.array_equal(side[0], returned[0])
            assert mx.array_equal(side[1], returned[1])


def test_a_tile_costs_what_its_layout_says() -> None:
    """Codes of both sides, then 32 + 32 fp16 scales: 16·(k + v bits) + 4 bytes a token at 128 dims."""
    assert TileLayout(TURBO4, TURBO4, 128, 128).words * 4 == 32 * 132
    assert TileLayout(INT8, TURBO4, 64, 64).words * 4 == 32 * (64 + 32 + 4)
    assert TileLayout(FP16, TURBO3, 64, 64).words * 4 == 32 * (24 + 2)


def test_scales_lie_behind_the_codes_in_token_order() -> None:
    layout = TileLayout(TURBO2, TURBO2, 32, 32)
    sides = Packed(k=random_side(TURBO2, 1, 32, 32, 3), v=random_side(TURBO2, 1, 32, 32, 4))

    words = np.array(packing.pack(sides, layout))[0, 0]

    assert sides.k is not None
    assert sides.v is not None
    assert np.array_equal(words[128:144].view(np.float16), np.array(sides.k[1])[0])
    assert np.array_equal(words[144:160].view(np.float16), np.array(sides.v[1])[0])
