"""What Metal's kernels are given beside tokens: made once where it does not change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import mlx.core as mx
import numpy as np

from daemon.kernels import codebook, codec, trellis
from daemon.policy.schemes import FP16, INT8, Codec

DIMS = (64, 80, 96, 128, 192, 256)


def or_empty(part: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return *part*, or something of *dtype* in its place that is not read."""
    return empty(dtype) if part is None else part


def half_bits(kind: Codec) -> int:
    """Return twice the width of a code, which is whole for 3.5 bits too; 0: full precision."""
    return 0 if kind is FP16 else int(2 * kind.bits)


# What a kernel does not read still has to be there: 8 elements, for MLX puts smaller inputs into another address
# space, and the same source would be compiled once more.
@cache
def nothing() -> mx.array:
    """Return numbers that are not read."""
    return mx.zeros((8,))


@cache
def empty(dtype: mx.Dtype) -> mx.array:
    """Return vectors that are not read."""
    return mx.zeros((1, 1, 8), dtype)


@lru_cache(maxsize=64)
def sizes(*numbers: int) -> mx.array:
    """Return *numbers* as an array; all layers of a step have the same."""
    return mx.array(numbers, dtype=mx.int32)


@cache
def centroids(kind: Codec, dim: int) -> mx.array:
    """Return the centroids by code, or the step of a trellis, and zeros up to 32."""
    if kind.trellis:
        return _filled([trellis.STEP], 32)
    return _filled([] if kind in (FP16, INT8) else codebook.centroids(kind.bits, dim), 32)


@cache
def thresholds(kind: Codec, dim: int) -> mx.array:
    """Return the thresholds between the centroids that are not negative, and zeros up to 16."""
    plain = kind in (FP16, INT8) or kind.trellis
    return _filled([] if plain else codebook.thresholds(kind.bits, dim), 16)


def _filled(values: Sequence[float] | codebook.Float, size: int) -> mx.array:
    table = np.zeros(size, dtype=np.float32)
    table[: len(values)] = values
    return mx.array(table)


@cache
def stretches() -> mx.array:
    """Return the stretches of a vector that are tried (codec.STRETCHES)."""
    return mx.array(
        np.resize(np.array(codec.STRETCHES, dtype=np.float32), max(8, len(codec.STRETCHES)))
    )
