"""Attention over sinks, packed tiles and tail in plain mx: runs everywhere, and is the oracle of every kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import mlx.core as mx

from daemon.kernels import codec, packing
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE
from daemon.kernels.rotation import Side
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import FP16, Codec

FUSED_QUERIES = 8  # up to this many query tokens, codes are multiplied as they are, and what they are worth is paid per token
_FP16_MAX = 65504.0
# of one side that are in float32 at once, where keys and values are dequantized: 32 MB. Every block is some twenty operations.
_BLOCK_VALUES = 2**23

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


def narrowed(out: mx.array, kind: mx.Dtype) -> mx.array:
    """Return float32 *out* as *kind*; a mean of values that half precision can hold is not made infinite by its error."""
    return (mx.clip(out, -_FP16_MAX, _FP16_MAX) if kind == mx.float16 else out).astype(kind)


def _attend_raw(
    queries: mx.array, stored: Stored, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    return sdpa(queries, stored.k.joined(), stored.v.joined(), scale, mask, sinks)


def sdpa(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    """Let MLX attend to *keys* and *values* (H, T, D), all in full precision; otherwise the contract is attend's."""
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
    return narrowed(out.reshape(n_heads, length, -1), queries.dtype)


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
    kind, layout = queries.dtype, stored.layout
    # a rotation can gather a whole vector in one coordinate, which half precision may not be able to hold
    k_unit, v_unit = (
        _unit(dim) if kind == mx.float16 else 1.0 for dim in (layout.dim_k, layout.dim_v)
    )
    turned = queries.astype(mx.float32)
    if stored.keys is None or layout.k == FP16:
        turned = codec.rotate(turned, layout.k, "k")
        keys = _dequantized(stored.k, layout.k, "k", stored)
    else:
        keys = _restored_keys(stored, stored.keys)
    values = _dequantized(stored.v, layout.v, "v", stored)
    out = sdpa(
        (turned / k_unit).astype(kind),
        _joined(keys, k_unit, kind),
        _joined(values, v_unit, kind),
        scale * k_unit * k_unit,
        mask,
        sinks,
    )
    return narrowed(codec.unrotate(out.astype(mx.float32), layout.v, "v") * v_unit, kind)


def _unit(dim: int) -> float:
    """Return the least power of two that no coordinate exceeds when a vector of *dim* values up to 1 is rotated."""
    return 2.0 ** math.ceil(math.log2(dim) / 2)


def _joined(parts: Iterable[mx.array], unit: float, kind: mx.Dtype) -> mx.array:
    return mx.concatenate([(part / unit).astype(kind) for part in parts], axis=1)


def _restored_keys(stored: Stored, keys: KeyTransform) -> Iterator[mx.array]:
    """Yield all keys in the model's own basis: their mean depends on the position and cannot stay in the queries."""
    if stored.k.head is not None:
        yield stored.k.head
    for at, codes, scales in _packed_blocks(stored, "k"):
        centered = codec.reconstruct(codes, scales, stored.layout.k, "k")
        yield keys.restored(centered, at + stored.dropped)
    if stored.k.tail is not None:
        yield stored.k.tail


def _dequantized(raw: RawSide, kind: Codec, side: Side, stored: Stored) -> Iterator[mx.array]:
    """Yield all vectors of one side in the basis in which *kind* stores them."""
    if raw.head is not None:
        yield codec.rotate(raw.head, kind, side)
    if kind != FP16:
        for _, codes, scales in _packed_blocks(stored, side):
            vectors, factors = codec.decode(codes, scales, kind)
            yield vectors * factors[..., None]
    if raw.tail is not None:
        yield codec.rotate(raw.tail, kind, side)


def _packed_blocks(stored: Stored, side: Side) -> Iterator[tuple[int, mx.array, mx.array]]:
    """Yield the first token, the codes and the scales of runs of packed tokens."""
    tiles, layout = stored.tiles_in_use(), stored.layout
    step = max(1, _BLOCK_VALUES // (tiles.shape[0] * TILE * layout.side(side).dim))
    for tile in range(0, tiles.shape[1], step):
        block, first = tiles[:, tile : tile + step], tile * TILE
        at, to = max(first, stored.packed_from), min(first + step * TILE, stored.packed_to)
        inside = slice(at - first, to - first)
        yield (
            at,
            packing.codes_of(block, layout, side)[:, inside],
            packing.scales_of(block, layout, side)[:, inside],
        )
