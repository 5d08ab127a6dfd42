"""Encode and decode vectors: the codec's formulas in plain mx, without any layout.

A vector x becomes z = R·x, codes c and one fp16 scale S with x ≈ S·Rᵀ·c. Everything stays in the
rotated basis for as long as possible: attention rotates its queries and its output instead of every
stored vector.

Turbo codecs: u = z·√d/‖z‖ is coded by the nearest centroid and S = ‖z‖²/⟨z, c⟩ makes the inner
product with the stored vector unbiased (DRIVE, Vargaftik et al. 2021, Theorem 3). int8: S is the
largest magnitude over 127.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import cast

import mlx.core as mx

from daemon.kernels import codebook, rotation
from daemon.kernels.rotation import Side
from daemon.policy.schemes import INT8, Codec

_FP16_MAX = 65504.0
_TINY = 1e-30


def encode(x: mx.array, codec: Codec, side: Side) -> tuple[mx.array, mx.array]:
    """Return the codes and scales of *x*.

    Args:
        x: vectors of shape (..., T, D), any float dtype.
        codec: int8 or a turbo codec.
        side: `k` or `v`; each has a rotation of its own.

    Returns:
        codes of shape (..., T, D), uint8 (int8's are two's complement), and scales of shape (..., T), float16.
    """
    z = rotation.rotate(x, side)
    if codec == INT8:
        return _encode_int8(z)
    return _encode_turbo(z, int(codec.bits))


def decode(codes: mx.array, codec: Codec) -> mx.array:
    """Return the values that *codes* stand for, before the scale, in the rotated basis.

    Turbo codes become (m + ½)·λ: coordinates in units of their standard deviation.

    Args:
        codes: uint8, shape (..., T, D).
        codec: the codec they were encoded with.

    Returns:
        float32, the same shape.
    """
    if codec == INT8:
        return codes.view(mx.int8).astype(mx.float32)
    bits = int(codec.bits)
    return _decoder(bits)(codes) * codebook.step(bits, codes.shape[-1])


def reconstruct(codes: mx.array, scales: mx.array, codec: Codec, side: Side) -> mx.array:
    """Return the vectors that *codes* and *scales* stand for, in the original basis, float32."""
    return rotation.unrotate(decode(codes, codec) * scales.astype(mx.float32)[..., None], side)


def _encode_int8(z: mx.array) -> tuple[mx.array, mx.array]:
    scales = _fp16(mx.max(mx.abs(z), axis=-1) / 127.0)
    # divide by the stored, rounded scale, so that no rounding error is left in the codes
    divisor = scales.astype(mx.float32)[..., None]
    codes = mx.round(z / mx.where(divisor == 0, 1.0, divisor))
    return mx.clip(codes, -127, 127).astype(mx.int8).view(mx.uint8), scales


def _encode_turbo(z: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    dim = z.shape[-1]
    norm = mx.sqrt(mx.sum(z * z, axis=-1, keepdims=True))
    u = z * (dim**0.5 / mx.maximum(norm, _TINY))
    codes = _quantizer(bits, codebook.thresholds(bits, dim))(u)
    values = _decoder(bits)(codes) * codebook.step(bits, dim)
    # ‖z‖²/⟨z, c⟩ with z = u·‖z‖/√d is √d·‖z‖/⟨u, c⟩: one fewer square, so no overflow at large norms
    overlap = mx.sum(u * values, axis=-1)
    scales = dim**0.5 * norm[..., 0] / mx.maximum(overlap, _TINY)
    return codes, _fp16(mx.where(norm[..., 0] > _TINY, scales, 0.0))


def _fp16(scales: mx.array) -> mx.array:
    return mx.minimum(scales, _FP16_MAX).astype(mx.float16)


@cache
def _quantizer(bits: int, thresholds: tuple[float, ...]) -> Callable[[mx.array], mx.array]:
    half = 2 ** (bits - 1)

    def quantize(u: mx.array) -> mx.array:
        magnitude = mx.abs(u)
        index = mx.zeros(u.shape, dtype=mx.uint8)
        for threshold in thresholds:
            index = index + (magnitude > threshold).astype(mx.uint8)
        return mx.where(u < 0, half - 1 - index, half + index).astype(mx.uint8)

    return quantize


@cache
def _decoder(bits: int) -> Callable[[mx.array], mx.array]:
    compiled = mx.compile(partial(_grid_values, bits=bits), shapeless=True)
    return cast("Callable[[mx.array], mx.array]", compiled)


def _grid_values(codes: mx.array, *, bits: int) -> mx.array:
    """Return m + ½ with its sign for each code, by polynomial: a gather would cost ten times as much on a CPU."""
    u = codes.astype(mx.float32) - (2**bits - 1) / 2
    square = u * u
    value = mx.zeros_like(u)
    for coefficient in reversed(codebook.DECODE_POLYNOMIALS[bits]):
        value = value * square + coefficient
    return mx.round(value * u - 0.5) + 0.5
