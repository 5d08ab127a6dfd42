"""What caches cost in bytes, read off their real buffers, for any length of context.

Everything counts as on a 16-bit model: full-precision parts of a cache have the model's dtype, which on a
CPU may be 32 bits wide, so the buffers are filled with 16-bit numbers. MLX computes lazily: the buffers
of a long context get their sizes without ever being filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from daemon.cache.build import parts
from daemon.cache.cost import packed_bytes_per_token
from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.measure.divergence import PREFILL_CHUNK

_ITEM_BYTES = 2  # of a value at 16 bits


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one sequence.

    *bits_per_value* are those of the older tokens in all caches that hold them, *bytes_per_token* what one more
    token adds to a long sequence: nothing where there is a token budget. *context_bytes* are the allocated
    bytes at each asked length, *context_bytes_fp16* those of a 16-bit cache without spare room.
    """

    bits_per_value: float
    bytes_per_token: float
    bytes_per_token_fp16: float
    context_bytes: tuple[int, ...]
    context_bytes_fp16: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one cache: the bytes and the values of an older token, and whether each one more adds to the others."""

    token_bytes: float
    values: int
    grows: bool
    at: tuple[int, ...]
    exact_at: tuple[int, ...]


def footprint(caches: Sequence[Any], contexts: Sequence[int]) -> Footprint:
    """Return the bytes of caches like *caches*, which hold some tokens of a sequence."""
    known: dict[object, _Cost] = {}
    costs: list[_Cost] = []
    for cache in parts(caches):
        if not isinstance(cache, SequenceCache):
            costs.append(_stock(cache, contexts))
            continue
        row = cache.row
        key = (
            row.scheme,
            row.sink_tokens,
            row.tail_tokens,
            row.fold_tokens,
            row.token_budget,
            row.shapes(),
        )
        if key not in known:
            known[key] = _packed(row, contexts)
        costs.append(known[key])
    values = sum(cost.values for cost in costs)
    grow = [cost for cost in costs if cost.grows]
    return Footprint(
        bits_per_value=8 * sum(cost.token_bytes for cost in costs) / values
        if values
        else 8.0 * _ITEM_BYTES,
        bytes_per_token=sum(cost.token_bytes for cost in grow),
        bytes_per_token_fp16=sum(cost.values for cost in grow) * _ITEM_BYTES,
        context_bytes=tuple(map(sum, zip(*(cost.at for cost in costs), strict=True))),
        context_bytes_fp16=tuple(map(sum, zip(*(cost.exact_at for cost in costs), strict=True))),
    )


def _stock(cache: Any, contexts: Sequence[int]) -> _Cost:
    """Return the cost of mlx-lm's own *cache*: it grows, grows up to a window, or not at all."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if keys is None or values is None:
        constant = (cache.nbytes,) * len(contexts)
        return _Cost(0, 0, False, constant, constant)
    token = sum(side.shape[1] * side.shape[3] for side in (keys, values))
    window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
    at = tuple(token * _ITEM_BYTES * min(n, window or n) for n in contexts)
    grows = isinstance(cache, KVCache)
    return _Cost(token * _ITEM_BYTES if grows else 0, token if grows else 0, grows, at, at)


def _packed(row: Row, contexts: Sequence[int]) -> _Cost:
    (n_heads, dim_k), (_, dim_v) = row.shapes()
    values = n_heads * (dim_k + dim_v)
    at = tuple(_filled(row, length).nbytes for length in contexts)
    exact_at = tuple(values * _ITEM_BYTES * n for n in contexts)
    token_bytes = _token_bytes(row, n_heads, dim_k, dim_v)
    return _Cost(token_bytes, values, row.token_budget is None, at, exact_at)


def _token_bytes(row: Row, n_heads: int, dim_k: int, dim_v: int) -> float:
    unlimited = Row(row.scheme, sink_tokens=0, tail_tokens=0)  # a budget hides what a token costs
    return packed_bytes_per_token(unlimited, n_heads, dim_k, dim_v, mx.float16)


def _filled(like: Row, length: int) -> Row:
    row = like.fresh()
    (n_heads, dim_k), (_, dim_v) = like.shapes()
    for start in range(0, length, PREFILL_CHUNK):
        count = min(PREFILL_CHUNK, length - start)
        row.append(
            mx.zeros((n_heads, count, dim_k), dtype=mx.float16),
            mx.zeros((n_heads, count, dim_v), dtype=mx.float16),
        )
    row.pack()
    return row
