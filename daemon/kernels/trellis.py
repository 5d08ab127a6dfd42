"""Trellis-coded vectors: codes of 3 bits that choose among levels which the two codes before them select.

A value is one of 88 levels. Code c after c₁, before which came c₂, is level q = 8·c + (13·c₁ + 8·c₂ + 16) mod 32:
the codes before shift a comb of eight levels over all of them, so that neighbours resolve together
what 3 bits alone cannot. Before the first code of a vector comes its last one. This is trellis-coded
quantization (Marcellin & Fischer 1990) with a shift register for a trellis (QTIP, arXiv 2406.11235). The
levels lie on the int8 grid of kernels.codebook, ±(m + ½)·λ, and m is made by adding and comparing bytes:
no backend needs a table. ADR 21 tells how it was found and what it gains.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from daemon.kernels.codebook import Float
from daemon.kernels.fused import fused

# λ, whatever the length of a vector: it says at which scale values are coded
STEP = 24012 * 2.0**-20
FRACTION = 0.5

_LEVELS = 88
_CODES = 8
_STATES = 32  # what the codes before can be: the low two bits of one, then all three of the next
_TURN = 13  # of the shift, for a step of c₁
_START = 16
_BENDS = (13, 32)  # levels from the middle after which they lie further apart

# Viterbi's costs are whole numbers whose low bits name the state that they came from, so that the least cost of a
# state tells its way, too.
_UNIT = 2.0**20
_NAME = _STATES - 1
_UNREACHED = 1 << 30
_FAR = 8.0  # beyond it the last level is the nearest, whatever the codes
_SEAM = 16  # codes on either side of a vector's first one that decide on the state there

_BLOCK = 768  # vectors whose ways are sought together: fewer cost more in calls, more do not stay in a CPU's caches


def grid(codes: mx.array) -> mx.array:
    """Return ⌊level / λ⌋ of *codes*, uint8 (..., D), as the byte of a signed number; D is a multiple of 8."""
    words = mx.contiguous(codes).view(mx.uint64)
    before = mx.concatenate([words[..., -1:], words[..., :-1]], axis=-1)
    return _magnitudes(_numbers(words, before).view(mx.uint8))


def encode(u: mx.array) -> mx.array:
    """Return the codes, uint8, whose levels have a squared distance from *u* near the least, (..., D) with a variance near 1.

    It is the least of all that begin in the same state.
    """
    flat = u.reshape(-1, u.shape[-1])
    parts: list[mx.array] = []
    for at in range(0, flat.shape[0], _BLOCK):
        block = flat[at : at + _BLOCK]
        if parts:  # MLX would compute blocks side by side, and hold the costs of all
            (block,) = mx.depends([block], parts[-1:])
        parts.append(_encode(block))
    return mx.concatenate(parts).reshape(u.shape)


@cache
def levels() -> Float:
    """Return the levels, ascending, in units of a coordinate's standard deviation; shape (88,)."""
    numbers = _magnitudes(mx.arange(_LEVELS, dtype=mx.uint8)).view(mx.int8)
    return (np.array(numbers).astype(np.float64) + FRACTION) * STEP


def _number(words: mx.array, before: mx.array) -> mx.array:
    """Return q of eight codes at once, as bytes of 64-bit *words*; *before* has the words before them."""
    once = (words << 8) | (before >> 56)
    twice = (words << 16) | (before >> 48)
    # no sum of bytes exceeds 255
    shift = (once * _TURN + (twice << 3) + _START * 0x0101010101010101) & 0x1F1F1F1F1F1F1F1F
    return (words << 3) + shift


_numbers = fused(_number)


def _magnitude(q: mx.array) -> mx.array:
    """Return m of level *q* as the byte of a signed number: negative levels are the bitwise complements of positive ones."""
    half = _LEVELS // 2
    mirror = (q >= half).astype(mx.uint8) + 255  # all bits of a negative one, as bytes wrap around
    distance = (q + (256 - half)) ^ mirror
    bends = [mx.maximum(distance, bend) for bend in _BENDS]
    return (distance + distance + sum(bends[1:], bends[0]) + (256 - sum(_BENDS))) ^ mirror


_magnitudes = fused(_magnitude)


def _encode(u: mx.array) -> mx.array:
    """Return the codes of *u* (N, D)."""
    dim = u.shape[1]
    # what is computed for all vectors lies side by side
    columns = mx.contiguous(mx.clip(mx.nan_to_num(u), -_FAR, _FAR).T)
    distances = _distances(columns[:, None] - _heights())
    near = min(_SEAM, dim)
    seam = _way(distances, range(-near, near), None)[near - 1]
    way = _way(distances, range(dim), seam)
    return (mx.concatenate(way) % _CODES).astype(mx.uint8).T


def _way(distances: mx.array, steps: range, seam: mx.array | None) -> list[mx.array]:
    """Return the states, (1, N) each, after the *steps* of the cheapest way: Viterbi's algorithm.

    Args:
        distances: costs of the levels at each value of the vectors, int32 (D, 88, N).
        steps: places of the values; negative ones count from the end.
        seam: the state before the first step and after the last one; None: any.
    """
    dim, _, count = distances.shape
    order = _order()
    names = mx.contiguous(mx.broadcast_to(order[:, None], (_STATES, count)))
    cost = names if seam is None else mx.where(names == seam, 0, _UNREACHED) | names
    best: list[mx.array] = []
    for step in steps:
        # rows are shifts, ascending: code c at shift s has level 8·c + s
        branches = mx.as_strided(
            distances,
            (_STATES, _CODES, count),
            (count, 8 * count, 1),
            step % dim * _LEVELS * count,
        )
        branches = branches + cost[:, None]
        # the next state knows two bits of the code before, which are the shift modulo 4
        best.append(mx.min(branches.reshape(8, _STATES, count), axis=0))
        cost = _renamed(mx.take(best[-1], order, axis=0), names)
    state = mx.argmin(best[-1], axis=0, keepdims=True) if seam is None else seam
    way = []
    for costs in reversed(best):
        way.append(state)
        state = mx.take_along_axis(costs, state, axis=0) & _NAME
    return way[::-1]


@cache
def _order() -> mx.array:
    """Return the states in the order of their shifts: 13·(8·c₂ + c₁) + 16, modulo 32."""
    return mx.array(np.argsort((np.arange(_STATES) * _TURN + _START) % _STATES).astype(np.int32))


@cache
def _heights() -> mx.array:
    return mx.array(levels().astype(np.float32)[:, None])


def _distance(difference: mx.array) -> mx.array:
    return (difference * difference * _UNIT).astype(mx.int32) & ~_NAME


_distances = fused(_distance)
_renamed = fused(lambda costs, names: (costs & ~_NAME) | names)
