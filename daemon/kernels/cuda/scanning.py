"""Calls of the general kernel (scan.cuh): three nodes for one row, of every case that the fast kernel leaves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from daemon.kernels import codebook, rotation, trellis
from daemon.kernels.backend import computed
from daemon.kernels.cuda import plan, sources
from daemon.kernels.cuda.layer import FEWEST, bits_of, on_device
from daemon.kernels.keys import KeyTransform
from daemon.kernels.rotation import Side
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import FP16, INT8, Codec

_T = TypeVar("_T")


def scan(
    queries: mx.array,
    spans: mx.array,
    stored: Stored,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend from *queries* (n_heads, L, D) of one row, whose words are *spans*, to what it has *stored*."""
    layout, n_kv = stored.layout, stored.n_kv_heads
    n_heads, length, _ = queries.shape
    grouped = n_heads // n_kv
    k_packed, v_packed = layout.k != FP16, layout.v != FP16
    keys = _keys_of(stored) if k_packed else _no_keys()
    shared = plan.scan_shared_bytes(layout.dim_k, layout.dim_v, keys.width)
    blocks = plan.scan_blocks(grouped, length)
    splits = plan.scan_splits(n_kv, blocks, stored.length)
    k_head, k_tail = _both(stored.k, queries.dtype)
    v_head, v_tail = _both(stored.v, queries.dtype)
    inputs = [
        queries,
        _turned(queries, stored, keys) if k_packed else nothing(mx.float32),
        stored.tiles, spans, k_head, k_tail, v_head, v_tail,
        _levels(layout.k, layout.dim_k), _levels(layout.v, layout.dim_v),
        keys.mean, keys.pairs, keys.plain, keys.table,
    ]  # fmt: skip
    if mask is not None:
        inputs.append(_added(mask, length, stored.length))
    kernel = sources.scan_kernel(shared, masked=mask is not None)
    rows = n_heads * length
    (sums,) = kernel(
        inputs=inputs,
        template=[
            ("DIM_K", layout.dim_k), ("DIM_V", layout.dim_v), ("K_HALVES", int(2 * layout.k.bits)),
            ("K_TRELLIS", layout.k.trellis), ("V_HALVES", int(2 * layout.v.bits)),
            ("V_TRELLIS", layout.v.trellis), ("ORDER", layout.order), ("GROUPED", grouped),
            ("QUERIES", length), ("N_PAIRS", keys.n_pairs), ("N_PLAIN", keys.n_plain),
            ("SCALE", bits_of(scale)), ("SHARED", shared), ("Q", queries.dtype),
            ("K", k_head.dtype), ("V", v_head.dtype),
        ],
        grid=(splits * blocks * plan.SCAN_THREADS, n_kv, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(splits, rows * 2 * (layout.dim_v + 1))],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    # sums of values that are not packed are in the model's basis, and no others are there
    basis = _basis(layout.dim_v, "v", inverse=True) if v_packed else nothing(mx.float32)
    (out,) = sources.merge_kernel(turned=v_packed, sinks=sinks is not None)(
        inputs=[sums, basis] if sinks is None else [sums, basis, sinks],
        template=[
            ("DIM_V", layout.dim_v), ("HEADS", n_heads), ("QUERIES", length),
            ("L", mx.float32 if sinks is None else sinks.dtype), ("T", queries.dtype),
        ],
        grid=(rows * plan.SCAN_THREADS, 1, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[(n_heads, length, layout.dim_v)],
        output_dtypes=[queries.dtype],
    )  # fmt: skip
    attended: mx.array = out
    return attended


@dataclass(frozen=True, slots=True)
class _Keys:
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


def _keys_of(stored: Stored) -> _Keys:
    keys = stored.keys
    if keys is None:
        return _no_keys()
    if keys not in _CHANNELS:
        _CHANNELS[keys] = _channels(keys, stored.layout.dim_k)
    of = _CHANNELS[keys]
    if keys.mean is None:
        none = _no_keys()
        return _Keys(of.scale, none.mean, none.pairs, none.plain, none.table, 0, 0)
    table = (
        mx.ones((1, FEWEST))
        if keys.rotary is None
        else keys.rotary.whole_table(stored.packed_positions[1])
    )
    return _Keys(of.scale, keys.mean, of.pairs, of.plain, table, of.n_pairs, of.n_plain)


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
def _no_keys() -> _Keys:
    none, numbers = _indices([]), nothing(mx.float32)
    return _Keys(None, numbers, none, none, numbers[0], 0, 0)


def _indices(channels: list[int]) -> mx.array:
    return on_device(np.array(channels + [0] * FEWEST, dtype=np.int32))


def _turned(queries: mx.array, stored: Stored, keys: _Keys) -> mx.array:
    """Return *queries* as packed keys want them: scaled per channel, and in the stored basis; float32."""
    n_heads, length, dim = queries.shape
    inputs = [queries, _basis(dim, "k", inverse=False)]
    if keys.scale is not None:
        inputs.append(keys.scale)
    (out,) = sources.turn_kernel(scaled=keys.scale is not None)(
        inputs=inputs,
        template=[
            ("DIM_K", dim), ("GROUPED", n_heads // stored.n_kv_heads), ("QUERIES", length),
            ("Q", queries.dtype),
        ],
        grid=(n_heads * length * plan.SCAN_THREADS, 1, 1),
        threadgroup=(plan.SCAN_THREADS, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    turned: mx.array = out
    return turned


@cache
def _basis(dim: int, side: Side, *, inverse: bool) -> mx.array:
    """Return the matrix by which row vectors go into the stored basis, or out of it: (dim, dim), float32."""
    matrix = rotation.matrix(dim, side)
    basis = computed(mx.contiguous(matrix.T if inverse else matrix))
    mx.eval(basis)
    return basis


def dtypes_of(stored: Stored, dtype: mx.Dtype) -> set[mx.Dtype]:
    """Return the dtypes of what is *stored* in full precision; *dtype* stands for a side that has nothing."""
    return {_both(side, dtype)[0].dtype for side in (stored.k, stored.v)}


def _both(side: RawSide, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return what comes before and after the packed tokens, (H, n, D); in the place of what there is not, something that is not read."""
    some = side.head if side.head is not None else side.tail
    empty = nothing(dtype if some is None else some.dtype)
    return _or(side.head, empty), _or(side.tail, empty)


def _or(given: _T | None, other: _T) -> _T:
    return other if given is None else given


def _added(mask: mx.array, queries: int, length: int) -> mx.array:
    """Return *mask* as numbers to add, float32 (1 or n_heads, queries, length)."""
    if mask.dtype == mx.bool_:
        mask = mx.where(mask, 0.0, -mx.inf)
    mask = mask.astype(mx.float32)
    heads = mask.shape[0] if mask.ndim == 3 else 1
    return mx.contiguous(mx.broadcast_to(mask, (heads, queries, length)))


@cache
def _levels(kind: Codec, dim: int) -> mx.array:
    """Return the centroids of *kind*, or the step of its trellis, float32 (32,)."""
    levels = np.zeros(32, dtype=np.float32)
    if kind.trellis:
        levels[0] = trellis.STEP
    elif kind not in (FP16, INT8):
        values = codebook.centroids(kind.bits, dim)
        levels[: len(values)] = values
    return on_device(levels)


@cache
def nothing(dtype: mx.Dtype) -> mx.array:
    """Return what stands for vectors that there are none of; not to be read."""
    return mx.zeros((1, 1, FEWEST), dtype=dtype)
