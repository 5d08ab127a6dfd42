"""Rounding of vectors to codes on the GPU: one kernel, where MLX's own operations would be a hundred."""

from __future__ import annotations

from functools import cache
from math import prod

import mlx.core as mx
import numpy as np

from daemon.kernels import codebook
from daemon.kernels.backend import computed
from daemon.kernels.cuda import sources

_THREADS = 256
_WARP = 32


def closest(u: mx.array, bits: float, stretches: tuple[float, ...]) -> tuple[mx.array, mx.array]:
    """Return the codes c, of those that *stretches* of u round to, with the smallest angle to u; and ⟨u, c⟩.

    Args:
        u: float32 (..., D), of length √D.
        bits: the width of the codes.
        stretches: factors; of two as good, the first.

    Returns:
        uint8 (..., D) and float32 (...).
    """
    dim = u.shape[-1]
    count = prod(u.shape[:-1])
    blocks = -(-count * _WARP // _THREADS)
    codes, overlap = sources.round_kernel()(
        inputs=[mx.contiguous(u.reshape(count, dim)), numbers(bits, dim, stretches)],
        template=[
            ("DIM", dim), ("LEVELS", codebook.levels(bits)), ("STRETCHES", len(stretches)),
        ],
        grid=(max(blocks, 1) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[u.shape, u.shape[:-1]],
        output_dtypes=[mx.uint8, mx.float32],
    )  # fmt: skip
    return codes, overlap


@cache
def numbers(bits: float, dim: int, stretches: tuple[float, ...]) -> mx.array:
    """Return what kernels that round need: stretches, centroids and thresholds, float32, in the GPU's own memory."""
    parts = (stretches, codebook.centroids(bits, dim), codebook.thresholds(bits, dim))
    return computed(mx.array(np.concatenate(parts).astype(np.float32)))
