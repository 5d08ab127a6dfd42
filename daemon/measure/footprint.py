"""What caches cost in bytes, read off their real buffers, for any length of context.

Everything counts as on a 16-bit model: full-precision parts of a cache have the model's dtype, which on a
CPU may be 32 bits wide, so the buffers are filled with 16-bit numbers. MLX computes lazily: the buffers
of a long context get their sizes without ever being filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from daemon.cache.cost import packed_bytes_per_token
from daemon.cache.row import Row
from daemon.measure.divergence import PREFILL_CHUNK, MakeRow

_ITEM_BYTES = 2  # of a value at 16 bits


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one sequence.

    *bits_per_value* and *bytes_per_token* are what one more token adds to a long sequence in all caches
    that grow; *context_bytes* are the allocated bytes at each asked length, *context_bytes_fp16* those of a
    16-bit cache without spare room.
    """

    bits_per_value: float
    bytes_per_token: float
    bytes_per_token_fp16: float
    context_bytes: tuple[int, ...]
    context_bytes_fp16: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cost:
    per_token: float
    values: int
    at: tuple[int, ...]
    exact_at: tuple[int, ...]


def footprint(caches: Sequence[Any], make_row: MakeRow, contexts: Sequence[int]) -> Footprint:
    """Return the bytes of caches like *caches*, mlx-lm's own of some sequence, packed as *make_row* says."""
    known: dict[object, _Cost] = {}
    costs: list[_Cost] = []
    for index, cache in enumerate(caches):
        row = make_row(index)
        if row is None:
            costs += [_stock(part, contexts) for part in _parts(cache)]
            continue
        shape = tuple(side.shape[1::2] for side in cache.keys_and_values())
        key = (
            row.scheme,
            row.sink_tokens,
            row.tail_tokens,
            row.fold_tokens,
            row.token_budget,
            shape,
        )
        if key not in known:
            known[key] = _packed(row, shape, contexts)
        costs.append(known[key])
    values = sum(cost.values for cost in costs)
    per_token = sum(cost.per_token for cost in costs)
    return Footprint(
        bits_per_value=8 * per_token / values if values else 8.0 * _ITEM_BYTES,
        bytes_per_token=per_token,
        bytes_per_token_fp16=values * _ITEM_BYTES,
        context_bytes=tuple(map(sum, zip(*(cost.at for cost in costs), strict=True))),
        context_bytes_fp16=tuple(map(sum, zip(*(cost.exact_at for cost in costs), strict=True))),
    )


def _parts(cache: Any) -> Iterator[Any]:
    if isinstance(cache, CacheList):
        for part in cache.caches:
            yield from _parts(part)
    else:
        yield cache


def _stock(cache: Any, contexts: Sequence[int]) -> _Cost:
    """Return the cost of mlx-lm's own *cache*: it grows, grows up to a window, or not at all."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if keys is None or values is None:
        constant = (cache.nbytes,) * len(contexts)
        return _Cost(0, 0, constant, constant)
    token = sum(side.shape[1] * side.shape[3] for side in (keys, values))
    window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
    at = tuple(token * _ITEM_BYTES * min(n, window or n) for n in contexts)
    grows = type(cache) is KVCache
    return _Cost(token * _ITEM_BYTES if grows else 0, token if grows else 0, at, at)


def _packed(row: Row, shape: tuple[tuple[int, int], ...], contexts: Sequence[int]) -> _Cost:
    (n_heads, dim_k), (_, dim_v) = shape
    values = n_heads * (dim_k + dim_v)
    at = tuple(_filled(row.fresh(), shape, length).nbytes for length in contexts)
    exact_at = tuple(values * _ITEM_BYTES * n for n in contexts)
    if row.token_budget is not None:
        return _Cost(0, 0, at, exact_at)
    per_token = packed_bytes_per_token(row, n_heads, dim_k, dim_v, mx.float16)
    return _Cost(per_token, values, at, exact_at)


def _filled(row: Row, shape: tuple[tuple[int, int], ...], length: int) -> Row:
    (n_heads, dim_k), (_, dim_v) = shape
    for start in range(0, length, PREFILL_CHUNK):
        count = min(PREFILL_CHUNK, length - start)
        row.append(
            mx.zeros((n_heads, count, dim_k), dtype=mx.float16),
            mx.zeros((n_heads, count, dim_v), dtype=mx.float16),
        )
    row.pack()
    return row
