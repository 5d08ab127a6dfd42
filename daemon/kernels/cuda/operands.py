"""What the general kernel and the one that unpacks are given beside tokens: made once where it does not change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from daemon.kernels import codebook, rotation, trellis
from daemon.kernels.backend import computed
from daemon.kernels.cuda.layer import FEWEST, on_device
from daemon.kernels.keys import KeyTransform
from daemon.kernels.rotation import Side
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import FP16, INT8, Codec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Lost:
    """What packed keys of a layer have lost, as the general kernel reads it (`Mean` in scan.cuh); *scale* (KV heads, D)."""

    scale: mx.array | None
    mean: mx.array
    pairs: mx.array
    plain: mx.array
    table: mx.array
    n_pairs: int
    n_plain: int

    @property
    def width(self) -> int:
        """Columns of the table that are used."""
        return 2 * self.n_pairs + (self.n_plain > 0)


@dataclass(frozen=True, slots=True)
class _Channels:
    """What of a transform stays the same for all positions: scales, and which channels rotate together or not at all."""

    scale: mx.array
    pairs: mx.array
    plain: mx.array
    n_pairs: int
    n_plain: int


_CHANNELS: WeakKeyDictionary[KeyTransform, _Channels] = WeakKeyDictionary()


def lost(stored: Stored) -> Lost:
    """Return what the packed keys of *stored* have lost."""
    keys = stored.keys
    if keys is None:
        return no_keys()
    if keys not in _CHANNELS:
        _CHANNELS[keys] = _channels(keys, stored.layout.dim_k)
    of = _CHANNELS[keys]
    if keys.mean is None:
        none = no_keys()
        return Lost(of.scale, none.mean, none.pairs, none.plain, none.table, 0, 0)
    table = (
        mx.ones((1, FEWEST))
        if keys.rotary is None
        else keys.rotary.whole_table(stored.packed_positions[1])
    )
    return Lost(of.scale, keys.mean, of.pairs, of.plain, table, of.n_pairs, of.n_plain)


def _channels(keys: KeyTransform, dim: int) -> _Channels:
    rotary = keys.rotary
    pairs = [] if rotary is None else list(zip(rotary.first, rotary.second, strict=True))
    plain = list(range(dim)) if rotary is None else list(rotary.plain)
    return _Channels(
        scale=on_device(np.array(keys.scale.astype(mx.float32))),
        pairs=_indices([at for pair in pairs for at in pair]),
        plain=_indices(plain),
        n_pairs=len(pairs),
        n_plain=len(plain),
    )


@cache
def no_keys() -> Lost:
    """Return what is lost where nothing is."""
    none, numbers = _indices([]), nothing(mx.float32)
    return Lost(None, numbers, none, none, numbers[0], 0, 0)


def _indices(channels: list[int]) -> mx.array:
    return on_device(np.array(channels + [0] * FEWEST, dtype=np.int32))


@cache
def basis(dim: int, side: Side, *, inverse: bool) -> mx.array:
    """Return the matrix by which row vectors go into the stored basis, or out of it: (dim, dim), float32."""
    matrix = rotation.matrix(dim, side)
    ours = computed(mx.contiguous(matrix.T if inverse else matrix))
    mx.eval(ours)
    return ours


def dtypes_of(stored: Stored, dtype: mx.Dtype) -> set[mx.Dtype]:
    """Return the dtypes of what is *stored* in full precision; *dtype* stands for a side that has nothing."""
    return {either(side, dtype)[0].dtype for side in (stored.k, stored.v)}


def either(side: RawSide, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return what comes before and after the packed tokens, (H, n, D); in the place of what there is not, something that is not read."""
    some = side.head if side.head is not None else side.tail
    empty = nothing(dtype if some is None else some.dtype)
    return _or(side.head, empty), _or(side.tail, empty)


def _or(given: _T | None, other: _T) -> _T:
    return other if given is None else given


@cache
def levels(kind: Codec, dim: int) -> mx.array:
    """Return the centroids of *kind*, or the step of its trellis, float32 (32,)."""
    numbers = np.zeros(32, dtype=np.float32)
    if kind.trellis:
        numbers[0] = trellis.STEP
    elif kind not in (FP16, INT8):
        values = codebook.centroids(kind.bits, dim)
        numbers[: len(values)] = values
    return on_device(numbers)


@cache
def nothing(dtype: mx.Dtype) -> mx.array:
    """Return what stands for vectors that there are none of; not to be read."""
    return mx.zeros((1, 1, FEWEST), dtype=dtype)
