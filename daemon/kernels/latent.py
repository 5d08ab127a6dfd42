"""Attention over compressed latents (MLA): one cached vector a token is key and value at once.

The rotary part of a score is not computed here: the model adds it through the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from daemon.kernels import codec, packing, rotation
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored

_SIDE: Side = "k"  # latents are stored as keys, and read back with their rotation


@dataclass(frozen=True, slots=True)
class _Piece:
    """Latents of consecutive tokens, float32 (n, dim): plain ones, or codes with a scale each in the rotated basis."""

    vectors: mx.array
    scales: mx.array | None = None

    def scores(self, queries: mx.array) -> mx.array:
        if self.scales is None:
            return queries @ self.vectors.T
        return (rotation.rotate(queries, _SIDE) @ self.vectors.T) * self.scales

    def weighted_sum(self, weights: mx.array) -> mx.array:
        if self.scales is None:
            return weights @ self.vectors
        return rotation.unrotate((weights * self.scales) @ self.vectors, _SIDE)

    def plain(self) -> mx.array:
        if self.scales is None:
            return self.vectors
        return rotation.unrotate(self.vectors * self.scales[:, None], _SIDE)


def attend(
    queries: mx.array,
    stored: Stored,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return softmax(scale·q·cᵀ + mask)·c over every latent c in *stored*, for one query token.

    Args:
        queries: (n_heads, 1, dim), already in the latent's own space.
        stored: one sequence of one layer; its keys are the latents.
        scale: factor of the scores.
        mask: additive, broadcastable to (n_heads, 1, T): the scores of the rotary keys.
        sinks: learned sink logits, which no model with latent attention has.

    Returns:
        (n_heads, 1, dim) in the queries' dtype.

    Raises:
        ValueError: there are learned sinks, or several query tokens, for which models use `dense`.
    """
    if sinks is not None or queries.shape[1] != 1:
        raise ValueError("packed latents serve one query token, without learned sinks")
    pieces = _pieces(stored)
    query = queries[:, 0].astype(mx.float32)
    logits = mx.concatenate([piece.scores(query) for piece in pieces], axis=-1) * scale
    if mask is not None:
        logits = logits + mask.reshape(-1, stored.length).astype(mx.float32)
    weights = mx.softmax(logits, axis=-1)
    out, at = mx.zeros_like(query), 0
    for piece in pieces:
        end = at + piece.vectors.shape[0]
        out = out + piece.weighted_sum(weights[:, at:end])
        at = end
    return out[:, None].astype(queries.dtype)


def dense(stored: Stored, dtype: mx.Dtype) -> mx.array:
    """Return every latent in *stored* as a plain vector, (1, T, dim): what several query tokens need."""
    parts = [piece.plain().astype(dtype) for piece in _pieces(stored)]
    return mx.concatenate(parts, axis=0)[None]


def _pieces(stored: Stored) -> list[_Piece]:
    """Return all latents in the order of their tokens."""
    pieces = []
    if stored.k.head is not None:
        pieces.append(_Piece(stored.k.head[0].astype(mx.float32)))
    packed = None
    if stored.packed_to > stored.packed_from:
        packed = packing.unpack(stored.tiles_in_use(), stored.layout).k
    if packed is not None:
        codes, scales = (part[0, stored.packed_from : stored.packed_to] for part in packed)
        pieces.append(_Piece(*codec.decode(codes, scales, stored.layout.k)))
    if stored.k.tail is not None:
        pieces.append(_Piece(stored.k.tail[0].astype(mx.float32)))
    return pieces
