"""What Metal's kernels are given beside tokens: made once where it does not change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from daemon.kernels import codebook, codec
from daemon.kernels.keys import KeyTransform
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


@dataclass(frozen=True, slots=True)
class Lost:
    """What packed keys of a layer have lost: *scale* and *mean* (KV heads, D), *channels* (D, 3) as KeyTransform.partners says.

    *pairs* of channels rotate with the position; 0 where the mean stays the same. What is not there is not read.
    """

    scale: mx.array
    mean: mx.array
    channels: mx.array
    pairs: int
    scaled: bool
    has_mean: bool


_LOST: WeakKeyDictionary[KeyTransform, Lost] = WeakKeyDictionary()


def lost(keys: KeyTransform | None, dim: int) -> Lost:
    """Return what packed keys of *dim* values have lost that went through *keys*; None: nothing."""
    if keys is None:
        return _nothing_lost()
    if keys not in _LOST:
        mean, rotary = keys.mean, keys.rotary
        scale = mx.contiguous(keys.scale)
        own = nothing() if mean is None else mx.contiguous(mean)
        mx.eval(scale, own)
        pairs = 0 if mean is None or rotary is None else len(rotary.first)
        _LOST[keys] = Lost(
            scale, own, mx.array(keys.partners(dim)), pairs, scaled=True, has_mean=mean is not None
        )
    return _LOST[keys]


@cache
def _nothing_lost() -> Lost:
    none = nothing()
    return Lost(none, none, none.astype(mx.int32), 0, scaled=False, has_mean=False)


def angles(keys: KeyTransform | None, end: int) -> mx.array:
    """Return cosines and sines of all positions up to *end* or further, (positions, width); nothing where no mean rotates."""
    if keys is None or keys.mean is None or keys.rotary is None:
        return nothing()
    return keys.rotary.whole_table(end)


@lru_cache(maxsize=64)
def sizes(*numbers: int) -> mx.array:
    """Return *numbers* as an array; all layers of a step have the same."""
    return mx.array(numbers, dtype=mx.int32)


@cache
def centroids(kind: Codec, dim: int) -> mx.array:
    """Return what codes of *kind* index, float32 (32,)."""
    return mx.array(codec.levels(kind, dim))


@cache
def thresholds(kind: Codec, dim: int) -> mx.array:
    """Return the thresholds between the centroids that are not negative, and zeros up to 16."""
    table = np.zeros(16, dtype=np.float32)
    if kind not in (FP16, INT8) and not kind.trellis:
        values = codebook.thresholds(kind.bits, dim)
        table[: len(values)] = values
    return mx.array(table)


@cache
def stretches() -> mx.array:
    """Return the stretches of a vector that are tried (codec.STRETCHES)."""
    return mx.array(
        np.resize(np.array(codec.STRETCHES, dtype=np.float32), max(8, len(codec.STRETCHES)))
    )
