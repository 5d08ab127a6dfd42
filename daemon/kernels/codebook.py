"""The canonical centroids: half-integers on an int8 grid, so that every backend decodes the same numbers.

A rotated unit vector of d values has coordinates that follow a scaled Beta density,
f(t) ∝ (1 − t²/d)^((d−3)/2) for t = √d·y (Zandieh et al., TurboQuant, arXiv 2504.19874, §3). The
MSE-optimal codebook for it is Lloyd-Max. tqd's centroids are ±(m + ½)·λ: the integers m come from one
table per width and fit in a byte, and λ is the step that makes the codebook's error least for a
head_dim. Their error is within 1 % of Lloyd-Max, and the half-integers allow decoding without a
gather, by an odd polynomial.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

# m of each positive centroid, ascending; every m + ½ stays below 128, so a centroid fits in one byte.
MAGNITUDES: dict[int, tuple[int, ...]] = {
    2: (38, 127),
    3: (14, 44, 79, 127),
    4: (5, 18, 30, 43, 58, 75, 96, 127),
}

# Odd polynomials p with round(p(u) − ½) = m for u = i + ½, i the index of m: coefficients of u, u³, u⁵, …
# 2 and 3 bits interpolate; 4 bits is the minimax fit of degree 7 (largest error 0.456 < ½, so rounding is exact).
DECODE_POLYNOMIALS: dict[int, tuple[float, ...]] = {
    2: (76.0, 4.0),
    3: (28.857813, 0.3125, 0.025),
    4: (11.89665, 0.06080564, -0.0008578736, 2.504903e-05),
}

_STEP_UNIT = 2.0**-20  # λ is rounded to this, so that every platform has the same one


def beta_density(dim: int, t: Float) -> Float:
    """Return the density, up to a factor, of √dim times one coordinate of a random unit vector."""
    inside: Float = np.clip(1.0 - t * t / dim, 0.0, None)
    return inside ** ((dim - 3) / 2)


@cache
def step(bits: int, dim: int) -> float:
    """Return λ, the grid step of the *bits*-wide codebook for vectors of *dim* values.

    Fixed point of λ = E[t·(m+½)] / E[(m+½)²] under nearest-centroid assignment, which minimizes the
    mean squared error over λ.

    Raises:
        ValueError: there is no codebook of that width, or *dim* is below 4.
    """
    if bits not in MAGNITUDES:
        raise ValueError(f"no codebook of {bits} bits; there are {', '.join(map(str, MAGNITUDES))}")
    if dim < 4:
        raise ValueError(f"vectors of {dim} values are too short for a codebook; at least 4")
    magnitudes = np.array(MAGNITUDES[bits]) + 0.5
    t = np.linspace(0.0, min(np.sqrt(dim), 12.0), 200_001)[1:]
    weight = beta_density(dim, t)
    value = 2.5 / magnitudes[-1]
    for _ in range(200):
        nearest = magnitudes[np.searchsorted((magnitudes[1:] + magnitudes[:-1]) * value / 2, t)]
        better = float((weight * t * nearest).sum() / (weight * nearest * nearest).sum())
        if abs(better - value) < 1e-12:
            break
        value = better
    return float(round(value / _STEP_UNIT) * _STEP_UNIT)


def centroids(bits: int, dim: int) -> Float:
    """Return the centroids, ascending, in units of a coordinate's standard deviation; shape (2**bits,)."""
    positive = (np.array(MAGNITUDES[bits]) + 0.5) * step(bits, dim)
    return np.concatenate([-positive[::-1], positive])


def thresholds(bits: int, dim: int) -> tuple[float, ...]:
    """Return the midpoints between the positive centroids; the one at zero is implied by symmetry."""
    positive = centroids(bits, dim)[2 ** (bits - 1) :]
    return tuple(float(value) for value in (positive[1:] + positive[:-1]) / 2)
