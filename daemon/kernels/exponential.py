"""Powers of two in a few vector operations: MLX's own exponential takes a library call per number on x86 (mlx 0.32.4)."""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels.fused import fused

LOG2_E = 1.4426950408889634
_SMALLEST = -127.0  # what has no normal float32 power of two becomes 0

# 2^f on (-1, 0], coefficients of f⁰, f¹, …: a Chebyshev fit of degree 6, whose relative error is below 7e-9
_COEFFICIENTS = (
    0.9999999967753705, 0.6931469986411242, 0.24022402838946946, 0.05549016293822927, 0.009579041704897649,
    0.0012752586475209238, 0.00010935631194072408,
)  # fmt: skip


def exp2(x: mx.array) -> mx.array:
    """Return 2^x for float32 *x* up to 0, to 3e-7; below -126 it is 0, and what is no number stays none."""
    clipped = mx.maximum(x, _SMALLEST)
    return _fraction(clipped) * _whole(clipped).view(mx.float32)


def _power_of_whole(x: mx.array) -> mx.array:
    """Return the bits of 2^⌈x⌉."""
    return (x.astype(mx.int32) + 127) << 23


def _power_of_fraction(x: mx.array) -> mx.array:
    """Return 2^(x − ⌈x⌉); conversion to an integer rounds towards zero, which is up here."""
    c0, c1, c2, c3, c4, c5, c6 = _COEFFICIENTS
    f = x - x.astype(mx.int32).astype(mx.float32)
    square = f * f
    return (c0 + c1 * f) + (c2 + c3 * f) * square + (c4 + c5 * f + c6 * square) * (square * square)


_whole, _fraction = fused(_power_of_whole), fused(_power_of_fraction)
