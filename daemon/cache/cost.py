"""What a stored token costs in bytes, read off real buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from daemon.cache.build import CacheFactory, parts
from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.policy.schemes import REFERENCE_BITS

_TOKENS = 6  # enough to make the buffers, whose steps are longer


@dataclass(frozen=True, slots=True)
class BytesPerToken:
    """Bytes that one more token costs once it is packed, over all layers that keep every token."""

    effective: float
    fp16: float


def measure(model: Any, factory: CacheFactory) -> BytesPerToken:
    """Measure the bytes of a stored token on real buffers, layer by layer, and the same in a 16-bit cache."""
    caches = factory()
    model(mx.zeros((1, _TOKENS), dtype=mx.int32), cache=caches)
    effective = fp16 = 0.0
    for cache in parts(caches):
        if isinstance(cache, SequenceCache) and cache.row.token_budget is None:
            (n_heads, dim_k), (_, dim_v) = cache.row.shapes()
            dtype = getattr(mx, cache.row.dtype)
            effective += packed_bytes_per_token(cache.row, n_heads, dim_k, dim_v, dtype)
            fp16 += n_heads * (dim_k + dim_v) * REFERENCE_BITS / 8
        elif isinstance(cache, KVCache) and cache.keys is not None:
            for side in (cache.keys, cache.values):
                effective += side.nbytes / side.shape[2]
                fp16 += side.size / side.shape[2] * REFERENCE_BITS / 8
    return BytesPerToken(effective, fp16)


def packed_bytes_per_token(
    row: Row, n_heads: int, dim_k: int, dim_v: int, dtype: mx.Dtype
) -> float:
    """Return the bytes by which a row like *row* grows per token, between two lengths that are whole folds apart.

    *dtype* is that of tokens in full precision.
    """
    scratch = row.fresh()
    folds = 16 * row.fold_tokens
    # past the sinks, and both lengths leave the same tail
    first = -(-row.sink_tokens // row.fold_tokens) * row.fold_tokens + row.tail_tokens + folds
    used = []
    for tokens in (first, folds):
        scratch.append(
            mx.zeros((n_heads, tokens, dim_k), dtype=dtype),
            mx.zeros((n_heads, tokens, dim_v), dtype=dtype),
        )
        scratch.pack()
        used.append((scratch.used_bytes, scratch.packed_tokens))
    (bytes_before, tokens_before), (bytes_after, tokens_after) = used
    return (bytes_after - bytes_before) / (tokens_after - tokens_before)
