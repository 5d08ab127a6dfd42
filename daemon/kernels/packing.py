"""The canonical layout of packed keys and values: tiles of 32 tokens of one KV head (ADR 0005).

A tile is a run of 32-bit words: [K codes | V codes | K scales | V scales]; a side in full precision
has no part in it. Codes are in token-major order, 32 codes a group. A group of b-bit codes is one
plane for each power of two in b, largest first (3 = 2 + 1): a plane of w bits holds w bits of every
code, low bits first, in w words, code i in word i // (32/w) at bit w·(i mod 32/w). The largest plane
carries the low bits of a code. Codes of 3.5 bits are below 11: two neighbours a, b make one 7-bit code
a + 11·b, and those are packed in their place. Scales are fp16, token by token, two to a word, the
first one low; a token has one, or all scales and then all biases of its affine groups.

Tiles of a layout with another `order` have the same parts, with codes and scales permuted inside them
(daemon.kernels.order).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import mlx.core as mx

from daemon.kernels import order as orders
from daemon.kernels.backend import on_hopper
from daemon.kernels.fused import Chain, fused
from daemon.kernels.rotation import Side
from daemon.policy.schemes import FP16, Codec

TILE = 32  # tokens
LAYOUT_VERSION = 1

_PAIR_BASE = 11  # codes of 3.5 bits
_PAIR_BITS = 7  # 11·11 ≤ 2⁷


@dataclass(frozen=True, slots=True)
class SideLayout:
    """Where keys, or values, are in a tile: the first words of their codes and their scales, and how many there are of each."""

    codec: Codec
    dim: int
    codes_at: int
    code_words: int
    scales_at: int
    scale_words: int


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Where the parts of a tile are: all sizes in 32-bit words. *order* is the permutation id of its codes.

    Raises:
        ValueError: a codec cannot store vectors of that length, or not in that order.
    """

    k: Codec
    v: Codec
    dim_k: int
    dim_v: int
    order: int = orders.CANONICAL
    words: int = field(init=False, repr=False, compare=False)
    """Words of a whole tile."""
    _sides: dict[Side, SideLayout] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for codec, dim in ((self.k, self.dim_k), (self.v, self.dim_v)):
            if not codec.fits(dim):
                raise ValueError(f"{codec.name} cannot store vectors of {dim} values")
            if self.order == orders.FRAGMENTS and not orders.has_fragments(codec, dim):
                raise ValueError(f"{codec.name} of {dim} values cannot lie in fragments")
        k_codes, v_codes = _code_words(self.k, self.dim_k), _code_words(self.v, self.dim_v)
        k_scales, v_scales = (
            TILE * codec.scales(dim) // 2
            for codec, dim in ((self.k, self.dim_k), (self.v, self.dim_v))
        )
        codes = k_codes + v_codes
        # computed once: every call of a kernel asks for some of it
        object.__setattr__(self, "words", codes + k_scales + v_scales)
        sides = {
            "k": SideLayout(self.k, self.dim_k, 0, k_codes, codes, k_scales),
            "v": SideLayout(self.v, self.dim_v, k_codes, v_codes, codes + k_scales, v_scales),
        }
        object.__setattr__(self, "_sides", sides)

    def side(self, side: Side) -> SideLayout:
        """Return where the keys, or the values, of a tile are."""
        return self._sides[side]

    @property
    def packed(self) -> bool:
        """Whether any side is packed at all."""
        return self.words > 0


def _code_words(codec: Codec, dim: int) -> int:
    return 0 if codec == FP16 else int(codec.bits * dim)


@cache
def native_layout(k: Codec, v: Codec, dim_k: int, dim_v: int) -> TileLayout:
    """Return the layout in which MLX's default device reads tiles best: the same object for the same arguments.

    Raises:
        ValueError: a codec cannot store vectors of that length.
    """
    order = orders.native(k, v, dim_k, dim_v) if on_hopper() else orders.CANONICAL
    return TileLayout(k, v, dim_k, dim_v, order)


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes and scales of both sides, unpacked from their bits but not decoded; None for a side that is not packed.

    Codes: uint8 (H, T, D). Scales: float16 (H, T), or (H, T, 2·groups) of an affine codec.
    """

    k: tuple[mx.array, mx.array] | None
    v: tuple[mx.array, mx.array] | None


def pack(packed: Packed, layout: TileLayout) -> mx.array:
    """Return tiles of the codes and scales in *packed*, whose T is a multiple of 32.

    Returns:
        uint32, shape (H, T / 32, layout.words).
    """
    codes, scales = [], []
    sides: tuple[tuple[Side, tuple[mx.array, mx.array] | None, Codec], ...] = (
        ("k", packed.k, layout.k),
        ("v", packed.v, layout.v),
    )
    for name, side, codec in sides:
        if side is not None:
            n_heads, length, dim = side[0].shape
            tiled = side[0].reshape(n_heads, length // TILE, TILE * dim)
            numbers = side[1].reshape(n_heads, length // TILE, -1)
            if layout.order == orders.FRAGMENTS:
                by_token = tiled.reshape(*tiled.shape[:-1], TILE, dim)
                codes.append(orders.pack_fragments(by_token, name, int(codec.bits)))
                numbers = orders.permute_scales(numbers)
            else:
                codes.append(pack_codes(tiled, codec.bits))
            scales.append(mx.contiguous(numbers).view(mx.uint32))
    return mx.concatenate(codes + scales, axis=-1)


def reordered(tiles: mx.array, layout: TileLayout, order: int) -> mx.array:
    """Return *tiles* of *layout* with their codes in *order*, as snapshots (canonical) and devices want them."""
    if layout.order == order:
        return tiles
    return pack(unpack(tiles, layout), replace(layout, order=order))


def unpack(tiles: mx.array, layout: TileLayout) -> Packed:
    """Return the codes and scales that *tiles* hold; the inverse of pack."""

    def both(side: Side, codec: Codec) -> tuple[mx.array, mx.array] | None:
        if codec == FP16:
            return None
        return codes_of(tiles, layout, side), scales_of(tiles, layout, side)

    return Packed(k=both("k", layout.k), v=both("v", layout.v))


def codes_of(tiles: mx.array, layout: TileLayout, side: Side) -> mx.array:
    """Return the codes of one packed *side*, uint8 (H, T, D)."""
    of = layout.side(side)
    part = tiles[..., of.codes_at : of.codes_at + of.code_words]
    if layout.order == orders.FRAGMENTS:
        codes = orders.unpack_fragments(part, side, int(of.codec.bits))
    else:
        codes = unpack_codes(part, of.codec.bits)
    return codes.reshape(tiles.shape[0], -1, of.dim)


def scales_of(tiles: mx.array, layout: TileLayout, side: Side) -> mx.array:
    """Return the scales of one packed *side*, float16 (H, T), or (H, T, 2·groups) of an affine codec."""
    of = layout.side(side)
    scales = _copied(tiles[..., of.scales_at : of.scales_at + of.scale_words]).view(mx.float16)
    if layout.order == orders.FRAGMENTS:
        scales = orders.restore_scales(scales)
    each = (of.codec.scales(of.dim),) if of.codec.affine else ()
    return scales.reshape(tiles.shape[0], tiles.shape[1] * TILE, *each)


def pack_codes(codes: mx.array, bits: float) -> mx.array:
    """Pack uint8 *codes* of shape (..., N) into uint32 words of shape (..., N·bits/32).

    N is a multiple of 32; of 64 where *bits* is 3.5.
    """
    if bits % 1:
        pairs = codes.reshape(*codes.shape[:-1], -1, 2)
        return pack_codes(pairs[..., 0] + _PAIR_BASE * pairs[..., 1], _PAIR_BITS)
    groups = codes.reshape(*codes.shape[:-1], -1, TILE)
    planes = [
        _pack_plane((groups >> shift) & (2**width - 1), width)
        for width, shift in _planes(int(bits))
    ]
    words = planes[0] if len(planes) == 1 else mx.concatenate(planes, axis=-1)
    return words.reshape(*codes.shape[:-1], -1)


def unpack_codes(words: mx.array, bits: float) -> mx.array:
    """Unpack uint32 *words* of shape (..., N·bits/32) into uint8 codes of shape (..., N); the inverse of pack_codes."""
    if bits % 1:
        pairs = unpack_codes(words, _PAIR_BITS)
        return _split_pairs(pairs).view(mx.uint8)
    whole = int(bits)
    groups = _copied(words).reshape(*words.shape[:-1], -1, whole)
    codes, at = None, 0
    for width, shift in _planes(whole):
        plane = groups if width == whole else mx.contiguous(groups[..., at : at + width])
        part = _unpack_plane(plane, width, shift)
        codes = part if codes is None else codes | part
        at += width
    assert codes is not None
    return codes.reshape(*words.shape[:-1], -1)


def _copied(words: mx.array) -> mx.array:
    """Return a part of tiles as an array of its own.

    Operations that compute go over runs of words in vectors; `mx.contiguous` takes one word after another
    on a CPU (mlx 0.32.4), which takes 1.2 to 1.7 times as long.
    """
    return words | 0


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


def _unpack_plane(words: mx.array, width: int, shift: int) -> mx.array:
    """Unpack uint32 *words* (..., width) into uint8 values (..., 32), moved up by *shift* bits."""
    octets = words.view(mx.uint8)
    return octets if width == 8 else _spreader(width, shift)(octets).view(mx.uint8)


# To spread a byte's fields over bytes of their own, halve it again and again inside a wide integer: fields stay in
# order, and no strided copy is made. For each width: the integer, and (distance, mask) of each halving.
_SPREADS: dict[int, tuple[mx.Dtype, tuple[tuple[int, int], ...]]] = {
    4: (mx.uint16, ((4, 0x0F0F),)),
    2: (mx.uint32, ((12, 0x000F000F), (6, 0x03030303))),
    1: (mx.uint64, ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101))),
}


@cache
def _spreader(width: int, shift: int) -> Chain:
    """Return the function from bytes to integers whose bytes are their *width*-bit fields, moved up by *shift* bits."""
    kind, halvings = _SPREADS[width]

    def spread(octets: mx.array) -> mx.array:
        fields = octets.astype(kind)
        for distance, mask in halvings:
            fields = (fields | (fields << distance)) & mask
        return fields << shift if shift else fields

    return fused(spread)


def _split(pairs: mx.array) -> mx.array:
    """Return 16-bit integers with a in the low byte and b in the high one, for each a + 11·b."""
    wide = pairs.astype(mx.uint16)
    high = (wide * 187) >> 11  # exactly pairs // 11, for all that fit in 7 bits and more
    return wide + (256 - _PAIR_BASE) * high


_split_pairs = fused(_split)
