"""The canonical layout of packed keys and values: tiles of 32 tokens of one KV head (ADR 0005).

A tile is a run of 32-bit words: [K codes | V codes | K scales | V scales]; a side in full precision
has no part in it. Codes are in token-major order, 32 codes a group. A group of b-bit codes is one
plane for each power of two in b, largest first (3 = 2 + 1): a plane of w bits holds w bits of every
code, low bits first, in w words, code i in word i // (32/w) at bit w·(i mod 32/w). The largest plane
carries the low bits of a code. Scales are fp16, token by token, two to a word, the first one low.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from daemon.policy.schemes import FP16, Codec

TILE = 32  # tokens
LAYOUT_VERSION = 1

_SCALE_WORDS = TILE // 2


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Where the parts of a tile are: all sizes in 32-bit words."""

    k: Codec
    v: Codec
    dim_k: int
    dim_v: int

    @property
    def k_words(self) -> int:
        """Words of the K codes of a tile."""
        return 0 if self.k is FP16 else int(self.k.bits) * self.dim_k

    @property
    def v_words(self) -> int:
        """Words of the V codes of a tile."""
        return 0 if self.v is FP16 else int(self.v.bits) * self.dim_v

    @property
    def words(self) -> int:
        """Words of a whole tile."""
        sides = (self.k is not FP16) + (self.v is not FP16)
        return self.k_words + self.v_words + sides * _SCALE_WORDS

    @property
    def packed(self) -> bool:
        """Whether any side is packed at all."""
        return self.words > 0


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes and scales of both sides, unpacked from their bits but not decoded; None for a side that is not packed.

    Codes: uint8 (H, T, D). Scales: float16 (H, T).
    """

    k: tuple[mx.array, mx.array] | None
    v: tuple[mx.array, mx.array] | None


def pack(packed: Packed, layout: TileLayout) -> mx.array:
    """Return tiles of the codes and scales in *packed*, whose T is a multiple of 32.

    Returns:
        uint32, shape (H, T / 32, layout.words).
    """
    codes, scales = [], []
    for side, codec in ((packed.k, layout.k), (packed.v, layout.v)):
        if side is not None:
            n_heads, length, dim = side[0].shape
            codes.append(
                pack_codes(side[0].reshape(n_heads, length // TILE, TILE * dim), int(codec.bits))
            )
            scales.append(side[1].reshape(n_heads, length // TILE, TILE).view(mx.uint32))
    return mx.concatenate(codes + scales, axis=-1)


def unpack(tiles: mx.array, layout: TileLayout) -> Packed:
    """Return the codes and scales that *tiles* hold; the inverse of pack."""
    at_v, at_scales = layout.k_words, layout.k_words + layout.v_words
    at_v_scales = at_scales + (_SCALE_WORDS if layout.k_words else 0)
    n_heads, n_tiles, _ = tiles.shape

    def side(
        codec: Codec, dim: int, first: int, last: int, at: int
    ) -> tuple[mx.array, mx.array] | None:
        if codec is FP16:
            return None
        codes = unpack_codes(tiles[..., first:last], int(codec.bits))
        scales = mx.contiguous(tiles[..., at : at + _SCALE_WORDS]).view(mx.float16)
        return codes.reshape(n_heads, n_tiles * TILE, dim), scales.reshape(n_heads, n_tiles * TILE)

    return Packed(
        k=side(layout.k, layout.dim_k, 0, at_v, at_scales),
        v=side(layout.v, layout.dim_v, at_v, at_scales, at_v_scales),
    )


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Pack uint8 *codes* of shape (..., N), N a multiple of 32, into uint32 words of shape (..., N·bits/32)."""
    groups = codes.reshape(*codes.shape[:-1], -1, TILE)
    planes = [
        _pack_plane((groups >> shift) & (2**width - 1), width) for width, shift in _planes(bits)
    ]
    words = planes[0] if len(planes) == 1 else mx.concatenate(planes, axis=-1)
    return words.reshape(*codes.shape[:-1], -1)


def unpack_codes(words: mx.array, bits: int) -> mx.array:
    """Unpack uint32 *words* of shape (..., N·bits/32) into uint8 codes of shape (..., N); the inverse of pack_codes."""
    groups = mx.contiguous(words).reshape(*words.shape[:-1], -1, bits)
    codes, at = None, 0
    for width, shift in _planes(bits):
        plane = groups if width == bits else mx.contiguous(groups[..., at : at + width])
        part = _unpack_plane(plane, width)
        codes = part << shift if codes is None else codes | (part << shift)
        at += width
    assert codes is not None
    return codes.reshape(*words.shape[:-1], -1)


def _planes(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the width of each plane and the bit of a code at which it starts."""
    shift = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, shift
            shift += width


def _pack_plane(values: mx.array, width: int) -> mx.array:
    """Pack *values* (..., 32), each below 2**width, into bytes low bits first; returns uint32 (..., width)."""
    if width == 8:
        return mx.contiguous(values).view(mx.uint32)
    per_byte = 8 // width
    lanes = values.reshape(*values.shape[:-1], -1, per_byte)
    byte = lanes[..., 0]
    for lane in range(1, per_byte):
        byte = byte | (lanes[..., lane] << (lane * width))
    return mx.contiguous(byte).view(mx.uint32)


def _unpack_plane(words: mx.array, width: int) -> mx.array:
    """Unpack uint32 *words* (..., width) into uint8 values (..., 32); the inverse of _pack_plane."""
    octets = words.view(mx.uint8)
    if width == 8:
        return octets
    lanes = [(octets >> (lane * width)) & (2**width - 1) for lane in range(8 // width)]
    return mx.stack(lanes, axis=-1).reshape(*octets.shape[:-1], -1)
