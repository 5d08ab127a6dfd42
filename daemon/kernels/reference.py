"""Attention over sinks, packed tiles and tail in plain mx: runs everywhere, and is the oracle of every kernel."""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels import codec, packing
from daemon.kernels.keys import KeyTransform
from daemon.kernels.rotation import Side
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import Codec

FUSED_QUERIES = 8  # up to this many query tokens, scores are formed piece by piece and nothing is dequantized whole

Mask = mx.array | None


def attend(
    queries: mx.array, stored: Stored, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Return softmax(scale·q·kᵀ + mask)·v over everything *stored*.

    The queries are those of the newest L tokens; each attends to itself and to what came before.

    Args:
        queries: (n_heads, L, dim_k); n_heads is a multiple of the stored KV heads (GQA).
        stored: one sequence of one layer.
        scale: factor of the scores.
        mask: None for causal, or boolean or additive, broadcastable to (n_heads, L, T).
        sinks: learned sink logits of shape (n_heads,), or None.

    Returns:
        (n_heads, L, dim_v) in the queries' dtype.
    """
    if stored.packed_to <= stored.packed_from:
        return _attend_raw(queries, stored, scale, mask, sinks)
    if queries.shape[1] <= FUSED_QUERIES:
        return _attend_pieces(queries, stored, scale, mask, sinks)
    return _attend_dequantized(queries, stored, scale, mask, sinks)


def _attend_raw(
    queries: mx.array, stored: Stored, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    return _sdpa(queries, stored.k.joined(), stored.v.joined(), scale, mask, sinks)


def _sdpa(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    out: mx.array = mx.fast.scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        scale=scale,
        mask=("causal" if queries.shape[1] > 1 else None) if mask is None else mask,
        sinks=sinks,
    )
    return out[0]


def _attend_pieces(
    queries: mx.array, stored: Stored, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Score sinks, packed tokens and tail apart: packed ones in the rotated basis, scaled after the product."""
    n_heads, length, _ = queries.shape
    n_kv = stored.n_kv_heads
    grouped = queries.astype(mx.float32).reshape(n_kv, -1, queries.shape[-1])
    packed = packing.unpack(stored.tiles_in_use(), stored.layout)

    scores = _scores(grouped, stored.k, packed.k, stored.layout.k, stored) * scale
    scores = scores.reshape(n_heads, length, stored.length)
    scores = _masked(scores, mask)
    weights = _softmax(scores, sinks).reshape(n_kv, -1, stored.length)
    out = _weighted_sum(weights, stored.v, packed.v, stored.layout.v, stored)
    return out.reshape(n_heads, length, -1).astype(queries.dtype)


def _scores(
    queries: mx.array,
    raw: RawSide,
    packed: tuple[mx.array, mx.array] | None,
    kind: Codec,
    stored: Stored,
) -> mx.array:
    if packed is None:
        return queries @ raw.joined().astype(mx.float32).swapaxes(-1, -2)
    stored_keys, factors = codec.decode(*_in_range(packed, stored), kind)
    keys = stored.keys
    rotated = codec.rotate(queries if keys is None else keys.scaled(queries), kind, "k")
    middle = (rotated @ stored_keys.swapaxes(-1, -2)) * factors[:, None]
    bias = None if keys is None else keys.bias(queries, *stored.packed_positions)
    if bias is not None:
        middle = middle + bias
    outer = [
        None if part is None else queries @ part.astype(mx.float32).swapaxes(-1, -2)
        for part in (raw.head, raw.tail)
    ]
    return mx.concatenate(
        [part for part in (outer[0], middle, outer[1]) if part is not None], axis=-1
    )


def _weighted_sum(
    weights: mx.array,
    raw: RawSide,
    packed: tuple[mx.array, mx.array] | None,
    kind: Codec,
    stored: Stored,
) -> mx.array:
    if packed is None:
        return weights @ raw.joined().astype(mx.float32)
    stored_values, factors = codec.decode(*_in_range(packed, stored), kind)
    middle = weights[..., stored.packed_from : stored.packed_to] * factors[:, None]
    out = codec.unrotate(middle @ stored_values, kind, "v")
    if raw.head is not None:
        out = out + weights[..., : stored.packed_from] @ raw.head.astype(mx.float32)
    if raw.tail is not None:
        out = out + weights[..., stored.packed_to :] @ raw.tail.astype(mx.float32)
    return out


def _in_range(packed: tuple[mx.array, mx.array], stored: Stored) -> tuple[mx.array, mx.array]:
    codes, scales = packed
    window = slice(stored.packed_from, stored.packed_to)
    return codes[:, window], scales[:, window]


def _masked(scores: mx.array, mask: Mask) -> mx.array:
    length, total = scores.shape[-2:]
    if mask is None:
        if length == 1:
            return scores
        mask = mx.arange(total - length, total)[:, None] >= mx.arange(total)[None]
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, -mx.inf)
    return scores + mask.astype(mx.float32)


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    logits = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([logits, scores], axis=-1), axis=-1, precise=True)[..., 1:]


def _attend_dequantized(
    queries: mx.array, stored: Stored, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Dequantize into the rotated basis and let MLX attend: no scores are kept, one layer's K and V are, for a moment."""
    packed = packing.unpack(stored.tiles_in_use(), stored.layout)
    kind = queries.dtype
    keys, values = stored.layout.k, stored.layout.v
    if stored.keys is not None and packed.k is not None:
        whole = _restored_keys(stored, packed.k, stored.keys)
    else:
        whole = _dequantized(stored.k, packed.k, keys, "k", stored)
        queries = codec.rotate(queries, keys, "k").astype(kind)
    out = _sdpa(
        queries,
        whole.astype(kind),
        _dequantized(stored.v, packed.v, values, "v", stored).astype(kind),
        scale,
        mask,
        sinks,
    )
    return codec.unrotate(out, values, "v").astype(kind)


def _restored_keys(
    stored: Stored, packed: tuple[mx.array, mx.array], keys: KeyTransform
) -> mx.array:
    """Return all keys in the model's own basis: their mean depends on the position and cannot stay in the queries."""
    codes, scales = _in_range(packed, stored)
    centered = codec.reconstruct(codes, scales, stored.layout.k, "k")
    parts = [stored.k.head, keys.restored(centered, stored.packed_positions[0]), stored.k.tail]
    return mx.concatenate([part for part in parts if part is not None], axis=1)


def _dequantized(
    raw: RawSide, packed: tuple[mx.array, mx.array] | None, kind: Codec, side: Side, stored: Stored
) -> mx.array:
    if packed is None:
        return raw.joined()
    vectors, factors = codec.decode(*_in_range(packed, stored), kind)
    middle = vectors * factors[..., None]
    outer = [
        None if part is None else codec.rotate(part, kind, side) for part in (raw.head, raw.tail)
    ]
    return mx.concatenate(
        [part for part in (outer[0], middle, outer[1]) if part is not None], axis=1
    )
