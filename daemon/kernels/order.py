"""The orders in which a tile's codes may lie, each under a permutation id (ADRs 0005 and 0017).

Order 0 is canonical: token by token (daemon.kernels.packing). Order 1, *fragments*, is what CUDA's
tensor cores read without moving a bit: the 32 lanes of a warp hold D codes of a side each, in groups
of 32, and a group decodes to 8 registers of 4 signed bytes, register r, byte e.

    keys     lane 4·(t mod 8) + d div (D/4);  in it, code (t div 8)·(D/4) + d mod (D/4)
    values   lane 4·(d mod 8) + (t mod 8) div 2;  group d div 32,
             register 4·(d div 16 mod 2) + 2·(d div 8 mod 2) + t mod 2, byte t div 8

An order never mixes tiles, sides or heads, and changes no value: only where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from daemon.kernels.fused import Chain, fused
from daemon.kernels.rotation import Side
from daemon.policy.schemes import Codec

CANONICAL = 0
FRAGMENTS = 1

TENSOR_CORE_DIMS = (64, 128)

_TILE = 32  # tokens, and lanes of a warp
_GROUP = 32  # codes
_SIGNED = (4, 5)  # widths whose codes become a sign and a magnitude

Int = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Places:
    """Where every bit of a side's codes is, int32 (tokens, dim, bits) each: the word of the side, and the bit in it."""

    word: Int
    bit: Int


def has_fragments(codec: Codec, dim: int) -> bool:
    """Return whether the codes of *codec* can lie in fragments, for vectors of *dim* values."""
    whole = codec.bits in (8, 5, 4, 3, 2) and not codec.trellis
    return codec.rotated and whole and dim % 64 == 0


def native(k: Codec, v: Codec, dim_k: int, dim_v: int) -> int:
    """Return the order in which CUDA keeps tiles: fragments where its tensor-core kernel reads such vectors."""
    fast = dim_k == dim_v and dim_k in TENSOR_CORE_DIMS
    return FRAGMENTS if fast and has_fragments(k, dim_k) and has_fragments(v, dim_v) else CANONICAL


@cache
def scale_slots() -> Int:
    """Return, for each token of a tile, which of the 32 scales of its side is its own, in fragments."""
    token = np.arange(_TILE, dtype=np.int32)
    return token % 8 * 4 + token // 8


@cache
def places(side: Side, bits: int, dim: int) -> Places:
    """Return where the bits of relabelled codes are in fragments."""
    token, d = np.meshgrid(np.arange(_TILE), np.arange(dim), indexing="ij")
    if side == "k":
        quarter = dim // 4
        lane = token % 8 * 4 + d // quarter
        place = token // 8 * quarter + d % quarter
        group, register, byte = place // _GROUP, place % _GROUP // 4, place % 4
    else:
        lane = d % 8 * 4 + token % 8 // 2
        group, byte = d // 32, token // 8
        register = d // 16 % 2 * 4 + d // 8 % 2 * 2 + token % 2
    word, bit = _in_group(bits, register, byte)
    # a lane reads its words 4, 2 or 1 at a time, and the 32 lanes of a warp read side by side
    count = dim // _GROUP * bits
    together = next(width for width in (4, 2, 1) if count % width == 0)
    at = group[..., None] * bits + word
    address = (at // together * _TILE + lane[..., None]) * together + at % together
    return Places(address.astype(np.int32), bit.astype(np.int32))


def _in_group(bits: int, register: Int, byte: Int) -> tuple[Int, Int]:
    """Return word and bit, (tokens, dim, bits) each, of the code that becomes *byte* of *register* in its group.

    Codes of 2 to 5 bits are selectors of a byte permutation: each takes a nibble of a word that decodes
    to two registers, the even one from the low half.
    """
    pair, odd = register // 2, register % 2
    nibble = 16 * odd + 4 * byte
    sign = 8 * byte + np.where(odd, 3, 7)  # where a byte permutation replicates signs from
    if bits == 8:
        words = [register] * 8
        at = [8 * byte + k for k in range(8)]
    elif bits == 4:
        words = [pair] * 4
        at = [nibble, nibble + 1, nibble + 2, sign]
    elif bits == 5:
        plane = np.full_like(register, 4)  # one word with the lowest bit of every code
        words = [plane, pair, pair, pair, pair]
        at = [8 * byte + 7 - register, nibble, nibble + 1, nibble + 2, sign]
    elif bits == 3:
        # three words hold a pair of registers each; the fourth pair fills the nibbles' spare bits
        spare = pair == 3
        words = [np.where(spare, k, pair) for k in range(3)]
        at = [np.where(spare, nibble + 3, nibble + k) for k in range(3)]
    else:
        words = [pair // 2] * 2
        at = [nibble + 2 * (pair % 2) + k for k in range(2)]
    return np.stack(words, axis=-1), np.stack(at, axis=-1)


def pack_fragments(codes: mx.array, side: Side, bits: int) -> mx.array:
    """Pack uint8 *codes* (..., 32, D) of whole tiles into uint32 words (..., D·bits) in fragments."""
    dim = codes.shape[-1]
    source, shift = _packing_table(side, bits, dim)
    flat = codes.reshape(*codes.shape[:-2], _TILE * dim)
    spread = mx.take(flat, source, axis=-1).astype(mx.uint32)
    if bits in _SIGNED:
        spread = _relabelled(bits)(spread)
    ones = (spread >> shift) & 1
    ones = ones.reshape(*ones.shape[:-1], dim * bits, 32)
    return mx.sum(ones << mx.arange(32, dtype=mx.uint32), axis=-1)


def unpack_fragments(words: mx.array, side: Side, bits: int) -> mx.array:
    """Unpack uint32 *words* (..., D·bits) in fragments into uint8 codes (..., 32, D); the inverse of pack_fragments."""
    dim = words.shape[-1] // bits
    codes = None
    for k, (source, shift) in enumerate(_unpacking_table(side, bits, dim)):
        bit = ((mx.take(words, source, axis=-1) >> shift) & 1).astype(mx.uint8) << k
        codes = bit if codes is None else codes | bit
    assert codes is not None
    if bits in _SIGNED:
        codes = _relabelled_back(bits)(codes)
    return codes.reshape(*words.shape[:-1], _TILE, dim)


def permute_scales(scales: mx.array) -> mx.array:
    """Return *scales* (..., 32) of whole tiles, token by token, in the order of fragments."""
    return mx.take(scales, mx.array(np.argsort(scale_slots())), axis=-1)


def restore_scales(scales: mx.array) -> mx.array:
    """Return *scales* (..., 32) token by token; the inverse of permute_scales."""
    return mx.take(scales, mx.array(scale_slots()), axis=-1)


@cache
def _packing_table(side: Side, bits: int, dim: int) -> tuple[mx.array, mx.array]:
    """Return, for each bit of a side's words in order, the code that it is of and which bit of it."""
    where = places(side, bits, dim)
    target = where.word.astype(np.int64) * 32 + where.bit
    source = np.argsort(target.reshape(-1))  # positions are a permutation, so this inverts it
    return mx.array((source // bits).astype(np.int32)), mx.array((source % bits).astype(np.uint32))


@cache
def _unpacking_table(side: Side, bits: int, dim: int) -> tuple[tuple[mx.array, mx.array], ...]:
    """Return, for each bit of a code, the word and the place in it of that bit of every code."""
    where = places(side, bits, dim)
    return tuple(
        (
            mx.array(where.word[..., k].reshape(-1)),
            mx.array(where.bit[..., k].reshape(-1).astype(np.uint32)),
        )
        for k in range(bits)
    )


@cache
def _relabelled(bits: int) -> Chain:
    """Return the function from codes, ascending, to magnitudes with the sign as the top bit."""
    return fused(partial(_to_sign, half=2 ** (bits - 1)))


@cache
def _relabelled_back(bits: int) -> Chain:
    """Return the inverse of _relabelled."""
    return fused(partial(_from_sign, half=2 ** (bits - 1)))


def _to_sign(codes: mx.array, *, half: int) -> mx.array:
    return mx.where(codes < half, 2 * half - 1 - codes, codes - half)


def _from_sign(labels: mx.array, *, half: int) -> mx.array:
    return mx.where(labels < half, labels + half, 2 * half - 1 - labels)
