"""Attention over packed keys and values in Metal kernels: what Apple GPUs run when a few tokens attend.

Two passes of online softmax over the canonical tiles, which are read as they are: `metal/attend.metal`
gives partial results of blocks of tokens, `metal/merge.metal` puts them together. Queries are rotated,
and what came from packed values is rotated back, by ordinary operations around them.

The kernels are executed and compared with the reference on a CPU emulation of Metal's language
(tests/metalshim). No Apple machine has run them.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import cast

import mlx.core as mx
import numpy as np

from daemon.kernels import codebook, codec, trellis
from daemon.kernels.case import Case
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.kernels.packing import TILE, TileLayout
from daemon.kernels.reference import FUSED_QUERIES
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16, INT8, Codec

_DIMS = (64, 80, 96, 128, 192, 256)
_LOG2E = 1.4426950408889634  # kernels compute powers of two
_SIMDGROUPS = 4  # of a threadgroup in the first pass
_MERGING = 8  # in the second
_MAX_BLOCKS = 64  # of packed tokens, for each KV head
_TILES_A_BLOCK = 2  # at least
_PLAIN_BLOCKS = 4
# Values of tokens whose weights are together below this share of the largest weight are not read.
_NEGLIGIBLE = 2.0**-12

_Kernel = Callable[..., list[mx.array]]


def refusal(case: Case) -> str | None:
    """Return why these kernels cannot do *case*, in words for the status; None: they can."""
    for kind in (case.k, case.v):
        if kind.affine:
            return f"Metal kernels do not read {kind.name}"
    for dim in (case.dim_k, case.dim_v):
        if dim not in _DIMS:
            return f"Metal kernels read vectors of {', '.join(map(str, _DIMS))} values, not {dim}"
    if case.queries > FUSED_QUERIES:
        return f"Metal kernels serve {FUSED_QUERIES} query tokens at a time, not {case.queries}"
    if case.n_heads % case.n_kv_heads:
        return f"{case.n_heads} query heads are no multiple of {case.n_kv_heads} KV heads"
    return None


def attend(
    queries: mx.array,
    stored: Stored,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
    *,
    negligible: float = _NEGLIGIBLE,
) -> mx.array:
    """Return softmax(scale·q·kᵀ + mask)·v over everything *stored*; the contract is reference.attend's.

    Some tokens of *stored* must be packed. A query to which the mask shows nothing gets zeros.

    Args:
        queries: (n_heads, L, dim_k).
        stored: one sequence of one layer.
        scale: factor of the scores.
        mask: None for causal, or boolean or additive, broadcastable to (n_heads, L, T).
        sinks: learned sink logits of shape (n_heads,), or None.
        negligible: how much weight, as a share of the largest, tokens may have together without their values
            being read; their weights count all the same.
    """
    layout = stored.layout
    n_heads, new_tokens, _ = queries.shape
    n_kv = stored.n_kv_heads
    n_queries = n_heads // n_kv * new_tokens

    plain = queries.astype(mx.float32).reshape(n_kv, n_queries, layout.dim_k) * (scale * _LOG2E)
    packed = _in_packed_basis(plain, stored)
    bias = _Bias.of(plain, stored.keys if layout.k is not FP16 else None)
    tiles = -(-stored.packed_to // TILE) - stored.packed_from // TILE
    in_full = stored.length - stored.packed_to + stored.packed_from
    packed_blocks = max(1, min(_MAX_BLOCKS, tiles // _TILES_A_BLOCK))
    plain_blocks = min(_PLAIN_BLOCKS, -(-in_full // TILE))
    blocks = packed_blocks + plain_blocks
    sizes = _sizes(
        stored.length,
        stored.packed_from,
        stored.packed_to,
        packed_blocks,
        plain_blocks,
        n_queries,
        new_tokens,
        stored.dropped,
        bias.pairs,
        packed_blocks if layout.v is not FP16 else 0,
    )
    angles, offsets = bias.tables(*stored.packed_positions)
    at_once = min(2, n_queries)  # query vectors of a SIMD-group: more would not fit its registers
    sums, states = _attend()(
        inputs=[
            sizes,
            mx.contiguous(packed),
            mx.contiguous(plain),
            stored.tiles,
            _or_empty(stored.k.head, queries.dtype),
            _or_empty(stored.k.tail, queries.dtype),
            _or_empty(stored.v.head, queries.dtype),
            _or_empty(stored.v.tail, queries.dtype),
            _centroids(layout.k, layout.dim_k),
            _centroids(layout.v, layout.dim_v),
            mx.contiguous(_rows(mask, stored.length)),
            bias.coefficients,
            mx.contiguous(bias.constants),
            angles,
            offsets,
            negligible / stored.length,
        ],
        template=[
            ("DIM_K", layout.dim_k),
            ("DIM_V", layout.dim_v),
            ("K_HALF_BITS", _half_bits(layout.k)),
            ("V_HALF_BITS", _half_bits(layout.v)),
            ("K_TRELLIS", layout.dim_k if layout.k.trellis else 0),
            ("V_TRELLIS", layout.dim_v if layout.v.trellis else 0),
            ("QUERIES", at_once),
            ("MASK", 0 if mask is None else 1 if mask.dtype == mx.bool_ else 2),
            ("ROTARY", bias.pairs > 0),
        ],
        grid=(32, blocks, n_kv * -(-n_queries // at_once)),
        threadgroup=(32, _SIMDGROUPS, 1),
        output_shapes=[(n_kv * n_queries, blocks, layout.dim_v), (n_kv * n_queries, blocks, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    (out,) = _merge()(
        inputs=[sizes, sums, states, _nothing() if sinks is None else _base_2(sinks)],
        template=[("DIM_V", layout.dim_v), ("SINKS", sinks is not None)],
        grid=(32, _MERGING, n_kv * n_queries),
        threadgroup=(32, _MERGING, 1),
        output_shapes=[(2, n_heads, new_tokens, layout.dim_v)],
        output_dtypes=[mx.float32],
    )
    whole = out[1] if layout.v is FP16 else codec.unrotate(out[0], layout.v, "v") + out[1]
    return whole.astype(queries.dtype)


def encoding_refusal(layout: TileLayout) -> str | None:
    """Return why these kernels cannot encode into *layout*; None: they can."""
    for kind, dim in ((layout.k, layout.dim_k), (layout.v, layout.dim_v)):
        if kind.affine:
            return f"Metal kernels do not write {kind.name}"
        if dim > _DIMS[-1] or dim % 16:
            return f"Metal kernels do not encode vectors of {dim} values"
    return None


def tiles(
    k: mx.array | None,
    v: mx.array | None,
    layout: TileLayout,
    *,
    first: int,
    old: mx.array | None,
) -> mx.array:
    """Return the tiles that hold *k* and *v* from slot *first* on; the contract is encode.tiles'.

    Codes and scales are the reference's except where the order of a sum decides: a coordinate on a
    threshold, two stretches with one angle, a scale between two fp16 numbers.
    """
    given = k if k is not None else v
    assert given is not None, "there is nothing to encode"
    n_kv, count, _ = given.shape
    n_tiles = -(-(first + count) // TILE)
    (made,) = _encode()(
        inputs=[
            _sizes(first, count, int(old is not None), 0, 0, 0, 0, 0),
            _nothing() if k is None else mx.contiguous(codec.rotate(k, layout.k, "k")),
            _nothing() if v is None else mx.contiguous(codec.rotate(v, layout.v, "v")),
            _thresholds(layout.k, layout.dim_k),
            _thresholds(layout.v, layout.dim_v),
            _centroids(layout.k, layout.dim_k),
            _centroids(layout.v, layout.dim_v),
            _stretches(),
            _empty(mx.uint32) if old is None else old,
        ],
        template=[
            ("STRETCHES", len(codec.STRETCHES)),
            ("DIM_K", layout.dim_k),
            ("DIM_V", layout.dim_v),
            ("K_HALF_BITS", _half_bits(layout.k)),
            ("V_HALF_BITS", _half_bits(layout.v)),
            ("K_TRELLIS", layout.k.trellis),
            ("V_TRELLIS", layout.v.trellis),
        ],
        grid=(256, n_tiles, n_kv),
        threadgroup=(256, 1, 1),
        output_shapes=[(n_kv, n_tiles, layout.words)],
        output_dtypes=[mx.uint32],
    )
    return made


class _Bias:
    """What packed keys have lost and queries give back: *constants* for each, or *coefficients* of a rotating mean.

    *pairs* of channels rotate; 0 where there is no rotating mean.
    """

    def __init__(
        self, coefficients: mx.array, constants: mx.array, rotary: Rotary | None = None
    ) -> None:
        self.coefficients = coefficients
        self.constants = constants
        self._rotary = rotary
        self.pairs = 0 if rotary is None else len(rotary.first)

    @staticmethod
    def of(queries: mx.array, keys: KeyTransform | None) -> _Bias:
        """Return the bias of *queries* (H, N, dim)."""
        if keys is None or keys.mean is None:
            return _Bias(_nothing(), mx.zeros(queries.shape[:2]))
        if keys.rotary is None:
            return _Bias(_nothing(), mx.sum(queries * keys.mean[:, None], axis=-1))
        pairs, half = len(keys.rotary.first), queries.shape[-1] // 2
        parts = keys.rotary.coefficients(queries, keys.mean)
        around = [(0, 0), (0, 0), (0, half - pairs)]
        coefficients = mx.concatenate(
            [mx.pad(parts[..., :pairs], around), mx.pad(parts[..., pairs : 2 * pairs], around)],
            axis=-1,
        )
        plain = parts[..., 2 * pairs :]
        constants = plain[..., 0] if keys.rotary.plain else mx.zeros(queries.shape[:2])
        return _Bias(coefficients, constants, keys.rotary)

    def tables(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Return the table of angles at all positions up to *end*, and the one within a tile."""
        if self._rotary is None:
            return _nothing(), _nothing()
        return self._rotary.table(0, end), self._rotary.turns(TILE)


def _in_packed_basis(queries: mx.array, stored: Stored) -> mx.array:
    if stored.layout.k is FP16:
        return queries
    if stored.keys is not None:
        queries = stored.keys.scaled(queries)
    return codec.rotate(queries, stored.layout.k, "k")


def _rows(mask: mx.array | None, length: int) -> mx.array:
    """Return *mask* as (1 or n_heads, 1 or L, length)."""
    if mask is None:
        return _nothing()
    mask = mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
    return mx.broadcast_to(mask, (*mask.shape[:2], length))


def _base_2(logits: mx.array) -> mx.array:
    return logits.astype(mx.float32) * _LOG2E


def _or_empty(part: mx.array | None, dtype: mx.Dtype) -> mx.array:
    return _empty(dtype) if part is None else part


def _half_bits(kind: Codec) -> int:
    """Return twice the width of a code, which is whole for 3.5 bits too; 0: full precision."""
    return 0 if kind is FP16 else int(2 * kind.bits)


# What a kernel does not read still has to be there: 8 elements, for MLX puts smaller inputs into another address
# space, and the same source would be compiled once more.
@cache
def _nothing() -> mx.array:
    return mx.zeros((8,))


@cache
def _empty(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((1, 1, 8), dtype)


@lru_cache(maxsize=64)
def _sizes(*numbers: int) -> mx.array:
    """Return *numbers* as an array; all layers of a step have the same."""
    return mx.array(numbers, dtype=mx.int32)


@cache
def _centroids(kind: Codec, dim: int) -> mx.array:
    """Return the centroids by code, or the step of a trellis, and zeros up to 32."""
    if kind.trellis:
        return _filled([trellis.STEP], 32)
    return _filled([] if kind in (FP16, INT8) else codebook.centroids(kind.bits, dim), 32)


@cache
def _thresholds(kind: Codec, dim: int) -> mx.array:
    """Return the thresholds between the centroids that are not negative, and zeros up to 16."""
    plain = kind in (FP16, INT8) or kind.trellis
    return _filled([] if plain else codebook.thresholds(kind.bits, dim), 16)


def _filled(values: Sequence[float] | codebook.Float, size: int) -> mx.array:
    table = np.zeros(size, dtype=np.float32)
    table[: len(values)] = values
    return mx.array(table)


@cache
def _stretches() -> mx.array:
    return mx.array(
        np.resize(np.array(codec.STRETCHES, dtype=np.float32), max(8, len(codec.STRETCHES)))
    )


@cache
def _attend() -> _Kernel:
    return _kernel(
        "attend",
        inputs=(
            "sizes", "packed_queries", "plain_queries", "tiles", "k_head", "k_tail", "v_head", "v_tail",
            "k_centroids", "v_centroids", "mask", "coefficients", "constants", "angles", "offsets",
            "negligible",
        ),
        outputs=("sums", "states"),
        header=_source("trellis") + _source("codes"),
    )  # fmt: skip


@cache
def _merge() -> _Kernel:
    return _kernel("merge", inputs=("sizes", "sums", "states", "sinks"), outputs=("out",))


@cache
def _encode() -> _Kernel:
    return _kernel(
        "encode",
        inputs=(
            "sizes", "k", "v", "k_thresholds", "v_thresholds", "k_centroids", "v_centroids", "stretches",
            "old",
        ),
        outputs=("tiles",),
        header=_source("trellis") + _source("vectors"),
    )  # fmt: skip


def _kernel(
    name: str, *, inputs: tuple[str, ...], outputs: tuple[str, ...], header: str = ""
) -> _Kernel:
    made = mx.fast.metal_kernel(
        name=f"tqd_{name}",
        input_names=inputs,
        output_names=outputs,
        source=_source(name),
        header=header,
        ensure_row_contiguous=False,  # a side in full precision has spare room: it must not be copied at every step
    )
    return cast("_Kernel", made)


def _source(name: str) -> str:
    return (importlib.resources.files(__package__) / "metal" / f"{name}.metal").read_text("utf-8")
