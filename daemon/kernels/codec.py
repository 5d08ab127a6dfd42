"""Encode and decode vectors: the codecs' formulas in plain mx, without any layout.

A vector x becomes z = R·x, codes c and one fp16 scale S with x ≈ S·Rᵀ·c. Everything stays in the
codec's own basis for as long as possible: attention rotates its queries and its output instead of
every stored vector.

Turbo codecs: u = z·√d/‖z‖ is coded by the centroids nearest to a·u, for the stretch a among a few that
leaves the smallest angle between z and c, and S = ‖z‖²/⟨z, c⟩ makes the inner product with the stored
vector unbiased (DRIVE, Vargaftik et al. 2021, Theorem 3; it holds for any c). Other rules, to compare
with: ‖z‖/‖c‖ matches the norm, ⟨z, c⟩/‖c‖² leaves the least error, ‖z‖/√d is raw. A trellis codes u as a
whole (daemon.kernels.trellis), with the same S. int8: S is the
largest magnitude over 127. Affine codecs are `mx.quantize`, for comparison: no rotation, and a scale
and a bias for each group of values, x ≈ S_g·c + B_g.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from daemon.kernels import codebook, packing, rotation, trellis
from daemon.kernels.fused import Chain, fused
from daemon.kernels.rotation import Side
from daemon.policy.schemes import FP16, INT8, Codec

_FP16_MAX = 65504.0
_TINY = 1e-30
# The codes with the smallest angle are the nearest ones to a·u for some a: a code changes only where a·u crosses a
# threshold. These few find nearly all there is to gain (ADR 11).
STRETCHES = (1.0, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2)

Rounding = Callable[[mx.array, float], tuple[mx.array, mx.array]]
"""A way to choose codes, under the contract of closest."""


def rotate(x: mx.array, codec: Codec, side: Side) -> mx.array:
    """Return the vectors *x* in the basis in which *codec* stores them, in float32 unless that is their own."""
    return rotation.rotate(x, side) if codec.rotated else x


def unrotate(y: mx.array, codec: Codec, side: Side) -> mx.array:
    """Return the vectors *y* of *codec*'s basis in the model's; the inverse of rotate."""
    return rotation.unrotate(y, side) if codec.rotated else y


def encode(
    x: mx.array, codec: Codec, side: Side, rounding: Rounding | None = None
) -> tuple[mx.array, mx.array]:
    """Return the codes and scales of *x*.

    Args:
        x: vectors of shape (..., T, D), any float dtype.
        codec: any but fp16.
        side: `k` or `v`; each has a rotation of its own.
        rounding: what chooses the codes of a codebook; None: closest.

    Returns:
        codes of shape (..., T, D), uint8 (int8's are two's complement), and float16 scales of shape
        (..., T); an affine codec's are (..., T, 2·groups), the groups' scales and then their biases.
    """
    z = rotate(x, codec, side).astype(mx.float32)
    if codec.affine:
        return _encode_affine(z, codec)
    if codec == INT8:
        return _encode_int8(z)
    return _encode_turbo(z, codec, rounding or closest)


def decode(codes: mx.array, scales: mx.array, codec: Codec) -> tuple[mx.array, mx.array]:
    """Return values and factors: a stored vector, in *codec*'s basis, is its values times its factor.

    So a product with many vectors needs one multiplication by a factor for each, not for each value.

    Args:
        codes: uint8, shape (..., T, D).
        scales: as encode returned them.
        codec: the codec they were encoded with.

    Returns:
        values (..., T, D) and factors (..., T), both float32. Turbo values are centroids in grid steps
        (kernels.codebook), a trellis's are levels in its own; int8 values are codes.
    """
    scales = scales.astype(mx.float32)
    if codec.affine:
        return _decode_affine(codes, scales, codec), mx.ones(codes.shape[:-1])
    values = grid(codes, codec).astype(mx.float32)
    unit = grid_unit(codec, codes.shape[-1])
    return values + unit.fraction if unit.fraction else values, scales * unit.step


@dataclass(frozen=True, slots=True)
class GridUnit:
    """What grid numbers mean: a stored value is (number + *fraction*)·*step*·scale."""

    fraction: float
    step: float


def grid_unit(codec: Codec, dim: int) -> GridUnit:
    """Return what the grid numbers of *codec*, which is not affine, mean in vectors of *dim* values."""
    if codec == INT8:
        return GridUnit(fraction=0.0, step=1.0)
    if codec.trellis:
        return GridUnit(trellis.FRACTION, trellis.STEP)
    return GridUnit(codebook.fraction(codec.bits), codebook.step(codec.bits, dim))


def levels(codec: Codec, dim: int) -> npt.NDArray[np.float32]:
    """Return what codes of vectors of *dim* values index in a kernel: centroids, or a trellis's step; zeros up to 32."""
    table = np.zeros(32, dtype=np.float32)
    if codec.trellis:
        table[0] = trellis.STEP
    elif codec not in (FP16, INT8):
        values = codebook.centroids(codec.bits, dim)
        table[: len(values)] = values
    return table


def grid(codes: mx.array, codec: Codec) -> mx.array:
    """Return the numbers on the int8 grid that *codes* of *codec*, which is not affine, stand for: int8, like *codes*.

    *codes* are those of whole vectors, (..., D).
    """
    if codec == INT8:
        return codes.view(mx.int8)
    return (trellis.grid(codes) if codec.trellis else _grid_of(codec.bits)(codes)).view(mx.int8)


def reconstruct(codes: mx.array, scales: mx.array, codec: Codec, side: Side) -> mx.array:
    """Return the vectors that *codes* and *scales* stand for, in the model's basis, float32."""
    values, factors = decode(codes, scales, codec)
    return unrotate(values * factors[..., None], codec, side)


def _encode_affine(z: mx.array, codec: Codec) -> tuple[mx.array, mx.array]:
    z = mx.clip(z, -_FP16_MAX, _FP16_MAX)
    words, scales, biases = mx.quantize(z, codec.group(z.shape[-1]), int(codec.bits))
    # MLX packs 4 and 8 bits as our single planes are packed
    codes = packing.unpack_codes(words, codec.bits)
    return codes, mx.concatenate([scales, biases], axis=-1).astype(mx.float16)


def _decode_affine(codes: mx.array, scales: mx.array, codec: Codec) -> mx.array:
    groups = scales.shape[-1] // 2
    values = codes.astype(mx.float32).reshape(*codes.shape[:-1], groups, -1)
    values = values * scales[..., :groups, None] + scales[..., groups:, None]
    return values.reshape(codes.shape)


def _encode_int8(z: mx.array) -> tuple[mx.array, mx.array]:
    scales = _fp16(mx.max(mx.abs(z), axis=-1) / 127.0)
    # divide by the stored, rounded scale, so that no rounding error is left in the codes
    divisor = scales.astype(mx.float32)[..., None]
    codes = mx.round(z / mx.where(divisor == 0, 1.0, divisor))
    return mx.clip(codes, -127, 127).astype(mx.int8).view(mx.uint8), scales


def _encode_turbo(z: mx.array, codec: Codec, rounding: Rounding) -> tuple[mx.array, mx.array]:
    dim = z.shape[-1]
    norm = mx.sqrt(mx.sum(z * z, axis=-1, keepdims=True))
    u = z * (dim**0.5 / mx.maximum(norm, _TINY))
    if codec.trellis:
        codes = trellis.encode(u)
        overlap = _overlap(u, codes, codec)
    else:
        codes, overlap = rounding(u, codec.bits)
    scales = _scales(norm[..., 0], overlap, codes, codec)
    return codes, _fp16(mx.where(norm[..., 0] > _TINY, scales, 0.0))


def _overlap(u: mx.array, codes: mx.array, codec: Codec) -> mx.array:
    """Return ⟨u, c⟩ for the values c that *codes* stand for."""
    unit = grid_unit(codec, u.shape[-1])
    values = grid(codes, codec).astype(mx.float32) + unit.fraction
    return mx.sum(u * values, axis=-1) * unit.step


def _scales(norm: mx.array, overlap: mx.array, codes: mx.array, codec: Codec) -> mx.array:
    """Return S by the rule of *codec* for vectors z of *norm*, given ⟨u, c⟩ of u = z·√d/‖z‖: no square of z, no overflow."""
    dim = codes.shape[-1]
    raw: mx.array = norm * dim**-0.5
    if codec.rule == "unbiased":
        scales: mx.array = dim**0.5 * norm / mx.maximum(overlap, _TINY)
        return scales
    values, step = decode(codes, mx.ones(norm.shape), codec)
    square = mx.sum(values * values, axis=-1) * step * step
    match codec.rule:
        case "matched":
            scales = raw * mx.sqrt(dim / square)
        case "least squares":
            scales = raw * overlap / square
        case "raw":
            scales = raw
        case _:
            raise ValueError(f"codebooks have no scales by the rule {codec.rule}")
    return scales


def closest(u: mx.array, bits: float) -> tuple[mx.array, mx.array]:
    """Return the codes c, of those that u times each of STRETCHES rounds to, with the smallest angle to u; and ⟨u, c⟩.

    Args:
        u: float32 (..., D), of length √D.
        bits: the width of the codes.

    Returns:
        uint8 (..., D) and float32 (...).
    """
    dim = u.shape[-1]
    quantize, on_grid = _quantizer(bits, dim), _grid_of(bits)
    codes = overlap = cosine = None
    for stretch in STRETCHES:
        these = quantize(u * stretch)
        c = on_grid(these).view(mx.int8).astype(mx.float32) + codebook.fraction(bits)
        along = mx.sum(u * c, axis=-1)
        square = along * along / mx.maximum(mx.sum(c * c, axis=-1), _TINY)
        if codes is None or overlap is None or cosine is None:
            codes, overlap, cosine = these, along, square
            continue
        better = square > cosine
        codes = mx.where(better[..., None], these, codes)
        overlap = mx.where(better, along, overlap)
        cosine = mx.where(better, square, cosine)
    assert codes is not None
    assert overlap is not None
    return codes, overlap * codebook.step(bits, dim)


def _fp16(scales: mx.array) -> mx.array:
    return mx.minimum(scales, _FP16_MAX).astype(mx.float16)


@cache
def _quantizer(bits: float, dim: int) -> Chain:
    """Return the function from coordinates to the codes of their nearest centroids."""
    levels, thresholds = codebook.levels(bits), codebook.thresholds(bits, dim)

    def quantize(u: mx.array) -> mx.array:
        magnitude = mx.abs(u)
        exceeded = [(magnitude > threshold).astype(mx.uint8) for threshold in thresholds]
        code = _sum(exceeded) + levels // 2
        return mx.where(u < 0, levels - 1 - code, code)

    return fused(quantize)


@cache
def _grid_of(bits: float) -> Chain:
    """Return the function from codes to ⌊centroid / λ⌋ as the byte of a signed number, uint8."""
    return fused(partial(_grid, bits=bits))


def _grid(codes: mx.array, *, bits: float) -> mx.array:
    """Add up the steps between centroids below a code: bytes all along, sixteen to a CPU's vector, and no gather.

    Negative centroids mirror positive ones: whole numbers change their sign, half-integers all their bits.
    """
    half, whole = codebook.levels(bits) // 2, codebook.fraction(bits) == 0
    magnitudes = (0, *codebook.MAGNITUDES[bits]) if whole else codebook.MAGNITUDES[bits]
    positive = (codes >= half).astype(mx.uint8)
    mirror = positive + 255  # all bits of a negative one, as bytes wrap around
    distance = (
        ((codes + (256 - half)) ^ mirror) - mirror if whole else codes ^ (positive + (half - 1))
    )
    steps = [
        (distance >= at).astype(mx.uint8) * (above - below)
        for at, (below, above) in enumerate(pairwise(magnitudes), 1)
    ]
    magnitude = _sum(steps) + magnitudes[0]
    return (magnitude ^ mirror) - mirror if whole else magnitude ^ mirror


def _sum(terms: Sequence[mx.array]) -> mx.array:
    """Add pairwise, for a chain that is wide instead of deep."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        odd = terms[-1:] if len(terms) % 2 else []
        terms = [*(first + second for first, second in pairs), *odd]
    return terms[0]
