"""A rotary embedding as the tensor-core kernel wants it: exact angles, and tables of one tile's cosines and sines."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from daemon.kernels.keys import Rotary

PAIRS = 64  # the kernel's tables have room for so many
WORDS = 1184  # of `constants`; mean.cuh names the parts

_LARGEST = 32512  # what a cosine of 1 becomes: both bytes of it are signed
_REFINED_AT = (32, 1024, 32768)  # powers of two: position times frequency is exact in float32 there
_CHECKED_AT = (977, 5003, 20011)

Float = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Angles:
    """Pair j of channels is (j·step, j·step + gap) and turns by theta[j] radians a token; *factor* scales it.

    The channels from 2·len(theta) on do not rotate.
    """

    theta: Float
    factor: Float
    step: int
    gap: int


def angles(rotary: Rotary, dim: int) -> Angles | None:
    """Return the angles of *rotary* for vectors of *dim* values; None: they are not what the kernel can do.

    It can do pairs in the first channels, neighbours or halves apart, that turn by a fixed angle a token.
    """
    count = len(rotary.first)
    order = (list(rotary.first), list(rotary.second))
    evens = list(range(0, 2 * count, 2))
    if order == (list(range(count)), list(range(count, 2 * count))):
        step, gap = 1, count
    elif order == (evens, [first + 1 for first in evens]):
        step, gap = 2, 1
    else:
        return None
    if count > PAIRS or list(rotary.plain) != list(range(2 * count, dim)):
        return None
    theta, factor = _turn(rotary, dim, 1)
    for position in _REFINED_AT:
        phase, _ = _turn(rotary, dim, position)
        theta = theta + _wrapped(phase - theta * position) / position
    for position in _CHECKED_AT:
        phase, again = _turn(rotary, dim, position)
        # the embedding itself rounds position times frequency to float32
        off = np.abs(_wrapped(phase - theta * position)) - 2e-7 * position * np.abs(theta)
        if off.max() > 1e-3 or np.abs(again - factor).max() > 1e-3:
            return None
    return Angles(theta, factor, step, gap)


def _turn(rotary: Rotary, dim: int, position: int) -> tuple[Float, Float]:
    """Return by how much each pair is turned at *position*, within ±π, and how much longer it gets."""
    ones = np.zeros((1, dim), dtype=np.float32)
    ones[0, rotary.first] = 1.0
    turned = np.array(rotary.shift(mx.array(ones), position, 1)[0, 0].astype(mx.float32))
    cosine, sine = (turned[list(side)].astype(np.float64) for side in (rotary.first, rotary.second))
    return np.arctan2(sine, cosine), np.hypot(sine, cosine)


def _wrapped(angle: Float) -> Float:
    return np.asarray((angle + np.pi) % (2 * np.pi) - np.pi)


def constants(theta: Float) -> Words:
    """Return the kernel's constants for pairs that turn by *theta* radians a token (mean.cuh), uint32 (WORDS,)."""
    theta = np.concatenate([theta, np.zeros(PAIRS - len(theta))])
    words = np.zeros(WORDS, dtype=np.uint32)
    turns = [int(angle / (4 * np.pi) * 2.0**64) % 2**64 for angle in theta.tolist()]
    words[1056:] = np.array(turns, dtype=np.uint64).view(np.uint32)
    corrections = words[1024:1056].view(np.int32)
    middle = np.arange(16)[:, None] + 0.5
    for part, wave in enumerate((np.cos(middle * theta), np.sin(middle * theta))):
        value = np.rint(_LARGEST * wave).astype(np.int64)
        corrections[16 * part : 16 * part + 16] = -128 * value.sum(axis=1)
        low = (value + 128) % 256 - 128
        _place(words, 4 * part, (value - low) >> 8)
        _place(words, 4 * part + 2, low)
    return words


def _place(words: Words, block: int, bytes_of: npt.NDArray[np.int64]) -> None:
    """Put a (16, 64) matrix of signed bytes at *block* of the table, as the two operands of a product read it."""
    row, pair = np.meshgrid(np.arange(16), np.arange(PAIRS), indexing="ij")
    quad, byte = pair // 4, pair % 4
    lane = row % 8 * 4 + quad // 4
    component = quad % 2 * 2 + row // 8
    at = ((block + quad % 4 // 2) * 32 + lane) * 4 + component
    np.bitwise_or.at(words, at, (bytes_of & 255).astype(np.uint32) << (8 * byte).astype(np.uint32))
