"""Random rotations that make every coordinate of a key or value look alike.

R = (1/√d)·H·diag(s), a Hadamard matrix with random signs, where a Hadamard matrix of that size
exists in MLX (d = m·2^k with m in 1, 12, 20, 28); a dense random orthogonal matrix elsewhere. Keys
and values have independent signs. The signs come from SHA-256 in counter mode, so that they are the
same on every platform for ever; SEED_VERSION is part of every stored cache.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from daemon.kernels.backend import computed

SEED_VERSION = 7  # of eight draws of the signs (ADR 13)

Side = Literal["k", "v"]

_HADAMARD_FACTORS = (1, 12, 20, 28)


def hadamard_size(dim: int) -> bool:
    """Return whether MLX has a Hadamard transform of *dim* values.

    `mx.hadamard_transform` itself must not be asked: on other sizes it corrupts memory (mlx 0.32.4).
    """
    if dim < 2:
        return False
    for factor in _HADAMARD_FACTORS:
        rest, remainder = divmod(dim, factor)
        if not remainder and rest > 0 and rest & (rest - 1) == 0 and (factor == 1 or rest > 1):
            return True
    return False


def rotate(x: mx.array, side: Side) -> mx.array:
    """Return R·x for each vector of the last axis, in float32."""
    dim = x.shape[-1]
    x = x.astype(mx.float32)
    if hadamard_size(dim):
        return mx.hadamard_transform(x * signs(dim, side), scale=dim**-0.5)
    return x @ matrix(dim, side)


def unrotate(y: mx.array, side: Side) -> mx.array:
    """Return Rᵀ·y for each vector of the last axis, in float32; `unrotate(rotate(x)) == x`."""
    dim = y.shape[-1]
    y = y.astype(mx.float32)
    if dim & (dim - 1) == 0 and hadamard_size(dim):
        return mx.hadamard_transform(y, scale=dim**-0.5) * signs(dim, side)
    # Hadamard matrices of the sizes 12, 20 and 28 are not symmetric: transpose by matrix
    return y @ matrix(dim, side).T


def _stream(dim: int, side: Side, count: int) -> bytes:
    seed = f"tqd rotation {SEED_VERSION} {side} {dim}".encode()
    blocks = (
        hashlib.sha256(seed + counter.to_bytes(8, "big")).digest()
        for counter in range(-(-count // 32))
    )
    return b"".join(blocks)[:count]


@cache
def signs(dim: int, side: Side) -> mx.array:
    """Return s of a rotation by a Hadamard matrix: (dim,), float32, of 1 and −1."""
    bits = np.unpackbits(np.frombuffer(_stream(dim, side, -(-dim // 8)), dtype=np.uint8))[:dim]
    return mx.array(1.0 - 2.0 * bits.astype(np.float32))


@cache
def matrix(dim: int, side: Side) -> mx.array:
    """Return Rᵀ as a matrix, shape (dim, dim), float32: row vectors are rotated by x @ Rᵀ."""
    if hadamard_size(dim):
        return rotate(mx.eye(dim), side)
    return mx.array(_haar(dim, side).T.astype(np.float32))


@cache
def basis(dim: int, side: Side, *, inverse: bool) -> mx.array:
    """Return the matrix by which a kernel multiplies row vectors into the stored basis, or out of it: (dim, dim), float32."""
    turned = matrix(dim, side)
    basis = computed(mx.contiguous(turned.T if inverse else turned))
    mx.eval(basis)
    return basis


def _haar(dim: int, side: Side) -> npt.NDArray[np.float64]:
    """Return a random orthogonal matrix: QR of a Gaussian one, with the signs that make it Haar (Mezzadri 2007)."""
    integers = np.frombuffer(_stream(dim, side, 8 * dim * dim), dtype=">u4").reshape(2, dim, dim)
    uniform = (integers.astype(np.float64) + 0.5) / 2**32
    gaussian = np.sqrt(-2.0 * np.log(uniform[0])) * np.cos(2.0 * np.pi * uniform[1])
    q, r = np.linalg.qr(gaussian)
    return np.asarray(q * np.sign(np.diag(r)))
