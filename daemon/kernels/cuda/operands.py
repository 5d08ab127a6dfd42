"""What the general kernel and the one that unpacks are given beside tokens: made once where it does not change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from daemon.kernels import codec
from daemon.kernels.cuda.layer import FEWEST, on_device
from daemon.kernels.keys import KeyTransform
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import Codec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Lost:
    """What packed keys of a layer have lost, as the general kernel reads it (`Mean` in scan.cuh).

    *scale* (KV heads, D) or None. *partners* says of each channel what *pairs* and *plain* list (KeyTransform.partners).
    """

    scale: mx.array | None
    mean: mx.array
    partners: mx.array
    pairs: mx.array
    plain: mx.array
    table: mx.array
    n_pairs: int
    n_plain: int

    @property
    def width(self) -> int:
        """Columns of the table that are used; 0 where there is no mean."""
        return 2 * self.n_pairs + (self.n_plain > 0)


# with the table of the positions that there were so far
_LOST: WeakKeyDictionary[KeyTransform, Lost] = WeakKeyDictionary()


def lost(keys: KeyTransform | None, dim: int, end: int) -> Lost:
    """Return what packed keys of *dim* values have lost that went through *keys*, at positions before *end*; None: nothing."""
    if keys is None:
        return _nothing_lost()
    if keys not in _LOST:
        _LOST[keys] = _lost(keys, dim)
    known = _LOST[keys]
    if keys.mean is None or keys.rotary is None:
        return known
    table = keys.rotary.whole_table(end)
    if table is not known.table:
        known = _LOST[keys] = replace(known, table=table)
    return known


def _lost(keys: KeyTransform, dim: int) -> Lost:
    scale = on_device(np.array(keys.scale.astype(mx.float32)))
    if keys.mean is None:
        return replace(_nothing_lost(), scale=scale)
    rotary = keys.rotary
    pairs = [] if rotary is None else list(zip(rotary.first, rotary.second, strict=True))
    plain = list(range(dim)) if rotary is None else list(rotary.plain)
    return Lost(
        scale=scale,
        mean=keys.mean,
        partners=on_device(keys.partners(dim)),
        pairs=_indices([at for pair in pairs for at in pair]),
        plain=_indices(plain),
        table=mx.ones((1, FEWEST)),
        n_pairs=len(pairs),
        n_plain=len(plain),
    )


@cache
def _nothing_lost() -> Lost:
    none, numbers = _indices([]), nothing(mx.float32)
    return Lost(None, numbers, none, none, none, numbers[0], 0, 0)


def _indices(channels: list[int]) -> mx.array:
    return on_device(np.array(channels + [0] * FEWEST, dtype=np.int32))


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
    """Return what codes of *kind* index, float32 (32,)."""
    return on_device(codec.levels(kind, dim))


@cache
def nothing(dtype: mx.Dtype) -> mx.array:
    """Return what stands for vectors that there are none of; not to be read."""
    return mx.zeros((1, 1, FEWEST), dtype=dtype)
