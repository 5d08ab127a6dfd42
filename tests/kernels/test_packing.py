from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.kernels import packing
from daemon.kernels.packing import TILE, Packed, TileLayout
from daemon.policy.schemes import (
    AFFINE4,
    AFFINE8,
    FP16,
    INT8,
    TRELLIS3,
    TURBO2,
    TURBO3,
    TURBO3_5,
    TURBO4,
    TURBO5,
    Codec,
)

CODECS = (INT8, TURBO5, TURBO4, TURBO3_5, TRELLIS3, TURBO3, TURBO2, AFFINE8, AFFINE4)
WIDTHS = (1, 2, 3, 3.5, 4, 5, 6, 7, 8)
UINT = npt.NDArray[np.uint32]


def unpack_slowly(words: UINT, bits: float) -> list[int]:
    """Read codes from *words* bit by bit, straight from the layout's words: the oracle."""
    if bits == 3.5:
        return [code for pair in unpack_slowly(words, 7) for code in (pair % 11, pair // 11)]
    codes = []
    bits = int(bits)
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


def random_codes(seed: int, bits: float, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return codes of which each can occur: 11 of 3.5 bits, else all powers of two."""
    below = 11 if bits == 3.5 else 2 ** int(bits)
    return np.random.default_rng(seed).integers(0, below, shape).astype(np.uint8)


@pytest.mark.parametrize("bits", WIDTHS)
def test_packed_codes_read_back_bit_by_bit(bits: float) -> None:
    codes = random_codes(1, bits, (192,))

    words = packing.pack_codes(mx.array(codes), bits)

    assert words.dtype == mx.uint32
    assert words.shape == (192 * bits // 32,)
    assert unpack_slowly(np.array(words), bits) == codes.tolist()


def test_every_pair_of_codes_of_3_5_bits_reads_back() -> None:
    low, high = (codes.ravel() for codes in np.meshgrid(np.arange(11), np.arange(11)))
    codes = np.zeros((128, 2), dtype=np.uint8)
    codes[:121] = np.stack([low, high], axis=-1)

    words = packing.pack_codes(mx.array(codes.ravel()), 3.5)

    assert np.array_equal(np.array(packing.unpack_codes(words, 3.5)), codes.ravel())


@given(bits=st.sampled_from(WIDTHS), groups=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_unpack_inverts_pack(bits: float, groups: int, seed: int) -> None:
    codes = random_codes(seed, bits, (2, groups * 2 * TILE))

    assert np.array_equal(
        np.array(packing.unpack_codes(packing.pack_codes(mx.array(codes), bits), bits)), codes
    )


def random_side(
    codec: Codec, heads: int, tokens: int, dim: int, seed: int
) -> tuple[mx.array, mx.array] | None:
    if codec is FP16:
        return None
    codes = random_codes(seed, codec.bits, (heads, tokens, dim))
    each = (codec.scales(dim),) if codec.affine else ()
    scales = np.random.default_rng(seed).random((heads, tokens, *each)).astype(np.float16)
    return mx.array(codes), mx.array(scales)


@pytest.mark.parametrize("k", [*CODECS, FP16])
@pytest.mark.parametrize("v", [*CODECS, FP16])
def test_tiles_hold_both_sides(k: Codec, v: Codec) -> None:
    if k is FP16 and v is FP16:
        return
    layout = TileLayout(k, v, 96, 64)
    sides = Packed(k=random_side(k, 3, 64, 96, 1), v=random_side(v, 3, 64, 64, 2))

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
    assert TileLayout(TURBO5, TURBO3_5, 80, 64).words * 4 == 32 * (50 + 28 + 4)
    assert TileLayout(AFFINE4, AFFINE8, 96, 128).words * 4 == 32 * (48 + 3 * 4 + 128 + 2 * 4)


@pytest.mark.parametrize(("codec", "dim"), [(AFFINE8, 80), (TURBO3_5, 63), (TRELLIS3, 12)])
def test_a_layout_of_vectors_that_do_not_fit_is_refused(codec: Codec, dim: int) -> None:
    with pytest.raises(ValueError, match=f"{codec.name} cannot store vectors of {dim} values"):
        TileLayout(codec, FP16, dim, dim)


def test_scales_lie_behind_the_codes_in_token_order() -> None:
    layout = TileLayout(TURBO2, TURBO2, 32, 32)
    sides = Packed(k=random_side(TURBO2, 1, 32, 32, 3), v=random_side(TURBO2, 1, 32, 32, 4))

    words = np.array(packing.pack(sides, layout))[0, 0]

    assert sides.k is not None
    assert sides.v is not None
    assert np.array_equal(words[128:144].view(np.float16), np.array(sides.k[1])[0])
    assert np.array_equal(words[144:160].view(np.float16), np.array(sides.v[1])[0])


def test_affine_scales_lie_token_by_token_before_their_biases() -> None:
    layout = TileLayout(AFFINE4, AFFINE4, 128, 64)
    sides = Packed(k=random_side(AFFINE4, 1, 32, 128, 3), v=random_side(AFFINE4, 1, 32, 64, 4))

    words = np.array(packing.pack(sides, layout))[0, 0]

    assert sides.k is not None
    assert sides.v is not None
    scales = words[layout.side("k").scales_at :].view(np.float16)
    assert np.array_equal(scales[: 32 * 4].reshape(32, 4), np.array(sides.k[1])[0])
    assert np.array_equal(scales[32 * 4 :].reshape(32, 2), np.array(sides.v[1])[0])
