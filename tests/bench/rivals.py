"""Published KV-cache schemes, re-implemented to be measured beside ours in the same run.

Each stores what its format stores and hands attention the numbers that come back out of it. Formats and
sources: affine is `mx.quantize` as mlx-lm's QuantizedKVCache uses it; turbo is mlx-swift-lm's
TurboQuantKVCache (Walsh-Hadamard rotation with random signs, Lloyd-Max codes, raw norms for values, keys
in affine 8 bit or calibrated by the deviation of the rotated unit keys); KIVI (Liu et al. 2024) quantizes
keys per channel over 32 tokens and values per token over 32 channels, and keeps a residual of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from daemon.cache.row import Row
from daemon.kernels import codebook, rotation
from daemon.kernels.packing import TILE
from daemon.kernels.rotation import Side
from daemon.policy.schemes import SCHEMES

SINK_TOKENS, TAIL_TOKENS = 4, 32  # ours, given to the rivals in the second half of the table
KIVI_GROUP = 32
BOUNDARY_LAYERS = 2

Restore = Callable[[mx.array], mx.array]
"""From vectors (H, n, D) to what the scheme gives back for them, float32."""


class RivalRow(Row):
    """A row that holds what a rival's format gives back, in full precision for our attention to read.

    Tokens go through the format as they arrive, or, with a tail, 32 at a time when they leave it: the
    same moments as in our own rows.
    """

    def __init__(
        self, keys: Callable[[], Restore], values: Callable[[], Restore], *, sinks: int, tail: int
    ) -> None:
        super().__init__(SCHEMES["fp16"], sink_tokens=sinks, tail_tokens=tail)
        self._makers = (keys, values)
        self._restore = (keys(), values())
        self._restored_to = 0

    def fresh(self) -> RivalRow:
        """Return an empty row of the same format."""
        return RivalRow(*self._makers, sinks=self.sink_tokens, tail=self.tail_tokens)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add tokens; without a tail they are stored at once, so attention never sees them exactly."""
        super().append(keys, values)
        if not self.tail_tokens:
            self._restore_up_to(self.length)

    def pack(self) -> None:
        """Store all tokens but the tail."""
        self._restore_up_to(self._packable())

    def _restore_up_to(self, end: int) -> None:
        start = max(self._restored_to, self.sink_tokens)
        if end <= start:
            return
        for side, restore in zip((self._k, self._v), self._restore, strict=True):
            assert side._head is not None
            exact = side._head[:, start:end]
            stored = restore(exact).astype(exact.dtype)
            side._head = mx.slice_update(side._head, stored, mx.array([start]), (1,))
        self._restored_to = end


@dataclass(frozen=True)
class Rival:
    """A published scheme: its bits per value at head_dim *d*, scales included, and its formats by layer."""

    name: str
    bits: Callable[[int], float]
    keys: Callable[[], Restore]
    values: Callable[[], Restore]
    boundary: bool = False
    residual: int = 0
    rotated: bool = False

    def row(self, layer: int, n_layers: int, *, with_tail: bool) -> RivalRow:
        """Return the empty row of *layer*, as shipped or with our sinks and tail."""
        at_end = min(layer, n_layers - 1 - layer) < BOUNDARY_LAYERS
        keys, values = (
            (affine(8), affine(8)) if self.boundary and at_end else (self.keys, self.values)
        )
        sinks, tail = (SINK_TOKENS, TAIL_TOKENS) if with_tail else (0, self.residual)
        return RivalRow(keys, values, sinks=sinks, tail=tail)

    def mean_bits(self, head_dim: int, n_layers: int) -> float:
        """Return the bits per value over all layers."""
        if not self.boundary:
            return self.bits(head_dim)
        ends = min(2 * BOUNDARY_LAYERS, n_layers)
        return (ends * 8.5 + (n_layers - ends) * self.bits(head_dim)) / n_layers


def affine(bits: int, group: int = 64) -> Callable[[], Restore]:
    """Return mx.quantize's format: fp16 scale and bias for each *group* values."""

    def restore(x: mx.array) -> mx.array:
        size = group if x.shape[-1] % group == 0 else 32
        packed = mx.quantize(x.astype(mx.float32), group_size=size, bits=bits)
        return mx.dequantize(*packed, group_size=size, bits=bits)

    return lambda: restore


def turbo(bits: int, side: Side, *, calibrated: bool = False) -> Callable[[], Restore]:
    """Return mlx-swift-lm's format: the norm, raw, or, for calibrated keys, matched to the codes' own."""

    def make() -> Restore:
        # the first prompt decides the calibration, as published
        scales: list[mx.array] = []

        def restore(x: mx.array) -> mx.array:
            norm = mx.linalg.norm(x.astype(mx.float32), axis=-1, keepdims=True)
            y = rotation.rotate(x.astype(mx.float32) / mx.maximum(norm, 1e-20), side)
            if calibrated and not scales:
                scales.append(_calibration(y))
            scale = scales[0] if scales else mx.array(1.0)
            codes = _lloyd_max(y / scale, bits)
            back = codes * scale
            if calibrated:
                back = back / mx.maximum(mx.linalg.norm(back, axis=-1, keepdims=True), 1e-20)
            return rotation.unrotate(back, side) * norm.astype(mx.float16).astype(mx.float32)

        return restore

    return make


def _calibration(y: mx.array) -> mx.array:
    """Return the deviation of each rotated channel, mean 1, clipped to [¼, 4]; 1 where all are alike."""
    deviation = mx.sqrt(mx.var(y, axis=1, keepdims=True))
    scale = mx.clip(deviation / mx.mean(deviation, axis=-1, keepdims=True), 0.25, 4.0)
    alike = mx.max(mx.abs(scale - 1)).item() < 0.1
    return mx.array(1.0) if alike or y.shape[1] < 32 else scale


def _lloyd_max(y: mx.array, bits: int) -> mx.array:
    """Return the nearest centroid of each value of a rotated unit vector."""
    levels, edges = _levels(bits, y.shape[-1])
    index = mx.zeros(y.shape, dtype=mx.uint8)
    for edge in edges:
        index = index + (y > edge).astype(mx.uint8)
    return mx.take(mx.array(levels), index)


@cache
def _levels(bits: int, dim: int) -> tuple[list[float], list[float]]:
    """Return the Lloyd-Max levels and their midpoints for a coordinate of a random unit vector."""
    t = np.linspace(-1, 1, 400_001)
    weight = codebook.beta_density(dim, t * np.sqrt(dim))
    levels = np.linspace(-1, 1, 2**bits + 2)[1:-1] * 3 / np.sqrt(dim)
    for _ in range(500):
        cells = np.digitize(t, (levels[1:] + levels[:-1]) / 2)
        mass = np.bincount(cells, weight, len(levels))
        better = np.bincount(cells, weight * t, len(levels)) / mass
        if np.abs(better - levels).max() < 1e-9:
            break
        levels = better
    return levels.tolist(), ((levels[1:] + levels[:-1]) / 2).tolist()


def kivi(bits: int, side: Side) -> Callable[[], Restore]:
    """Return KIVI's format: keys by channel over groups of tokens, values by token over groups of channels."""

    def keys(x: mx.array) -> mx.array:
        # a tile that begins after the sinks is a shorter group; tokens behind the last whole one are too
        groups = [x[:, at : at + KIVI_GROUP] for at in range(0, x.shape[1], KIVI_GROUP)]
        return mx.concatenate([_uniform(group, bits, 1) for group in groups], axis=1)

    def values(x: mx.array) -> mx.array:
        groups = x.reshape(*x.shape[:-1], -1, KIVI_GROUP)
        return _uniform(groups, bits, -1).reshape(x.shape)

    return lambda: keys if side == "k" else values


def _uniform(x: mx.array, bits: int, axis: int) -> mx.array:
    """Quantize between the least and the largest value along *axis*, with fp16 zero and step."""
    x = x.astype(mx.float32)
    low = mx.min(x, axis=axis, keepdims=True).astype(mx.float16).astype(mx.float32)
    span = mx.max(x, axis=axis, keepdims=True) - low
    step = mx.maximum(span / (2**bits - 1), 1e-7).astype(mx.float16).astype(mx.float32)
    return mx.clip(mx.round((x - low) / step), 0, 2**bits - 1) * step + low


def _kivi_bits(bits: int) -> Callable[[int], float]:
    return lambda _: bits + 2 * 16 / KIVI_GROUP


assert KIVI_GROUP == TILE  # what leaves the tail at once is one group of keys

RIVALS = (
    Rival("affine8", lambda _: 8.5, affine(8), affine(8)),
    Rival(
        "affine8 K, raw 4-bit V",
        lambda d: (8.5 + 4 + 16 / d) / 2,
        affine(8),
        turbo(4, "v"),
        rotated=True,
    ),
    Rival(
        "turbo8v3 (mlx-swift)",
        lambda d: (8.5 + 3 + 16 / d) / 2,
        affine(8),
        turbo(3, "v"),
        rotated=True,
    ),
    Rival(
        "turbo4 calibrated, boundary 2 (mlx-swift)",
        lambda d: 4 + 16 / d,
        turbo(4, "k", calibrated=True),
        turbo(4, "v"),
        boundary=True,
        rotated=True,
    ),
    Rival("affine4", lambda _: 4.5, affine(4), affine(4)),
    Rival("KIVI 4 bit", _kivi_bits(4), kivi(4, "k"), kivi(4, "v"), residual=32),
    Rival("KIVI 2 bit", _kivi_bits(2), kivi(2, "k"), kivi(2, "v"), residual=32),
)
