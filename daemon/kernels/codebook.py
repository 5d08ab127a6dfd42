"""The canonical centroids: numbers on an int8 grid, so that every backend decodes the same ones.

A rotated unit vector of d values has coordinates that follow a scaled Beta density,
f(t) ∝ (1 − t²/d)^((d−3)/2) for t = √d·y (Zandieh et al., TurboQuant, arXiv 2504.19874, §3). The
MSE-optimal codebook for it is Lloyd-Max. tqd's centroids lie within 1 % of its error (2 % at 5
bits): the integers m come from one table per width and fit in a byte, and λ is the grid step that
makes the codebook's error least for a head_dim.

A codebook with an even number of levels has centroids ±(m + ½)·λ, half-integers, so that a sign flip
is the bitwise complement of a byte. The one with 11 levels, 3.5 bits (log₂ 11 = 3.46), has a level at
zero and its centroids are whole: 0 and ±m·λ.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

# m of each positive centroid, ascending; every one fits in a signed byte.
MAGNITUDES: dict[float, tuple[int, ...]] = {
    2: (38, 127),
    3: (14, 44, 79, 127),
    3.5: (20, 40, 62, 89, 127),
    4: (5, 18, 30, 43, 58, 75, 96, 127),
    5: (2, 7, 12, 18, 23, 29, 34, 41, 47, 54, 61, 69, 79, 90, 105, 127),
}

_STEP_UNIT = 2.0**-20  # λ is rounded to this, so that every platform has the same one


def levels(bits: float) -> int:
    """Return how many centroids the codebook of *bits* has; codes are 0 to one less, ascending.

    Raises:
        ValueError: there is no codebook of that width.
    """
    if bits not in MAGNITUDES:
        widths = ", ".join(f"{width:g}" for width in MAGNITUDES)
        raise ValueError(f"no codebook of {bits:g} bits; there are {widths}")
    return 2 * len(MAGNITUDES[bits]) + (bits % 1 != 0)


def fraction(bits: float) -> float:
    """Return what is added to m: ½, or 0 where one level is zero."""
    return 0.0 if levels(bits) % 2 else 0.5


def beta_density(dim: int, t: Float) -> Float:
    """Return the density, up to a factor, of √dim times one coordinate of a random unit vector."""
    inside: Float = np.clip(1.0 - t * t / dim, 0.0, None)
    return inside ** ((dim - 3) / 2)


@cache
def step(bits: float, dim: int) -> float:
    """Return λ, the grid step of the *bits*-wide codebook for vectors of *dim* values.

    Fixed point of λ = E[t·g] / E[g²], g the grid value of the nearest centroid, which minimizes the
    mean squared error over λ.

    Raises:
        ValueError: there is no codebook of that width, or *dim* is below 4.
    """
    grid = _grid(bits)
    if dim < 4:
        raise ValueError(f"vectors of {dim} values are too short for a codebook; at least 4")
    t = np.linspace(0.0, min(np.sqrt(dim), 12.0), 200_001)[1:]
    weight = beta_density(dim, t)
    value = 2.5 / grid[-1]
    for _ in range(200):
        nearest = grid[np.searchsorted((grid[1:] + grid[:-1]) * value / 2, t)]
        better = float((weight * t * nearest).sum() / (weight * nearest * nearest).sum())
        if abs(better - value) < 1e-12:
            break
        value = better
    return float(round(value / _STEP_UNIT) * _STEP_UNIT)


def centroids(bits: float, dim: int) -> Float:
    """Return the centroids, ascending, in units of a coordinate's standard deviation; shape (levels,)."""
    upper = _grid(bits) * step(bits, dim)
    return np.concatenate([-upper[::-1][: levels(bits) // 2], upper])


def thresholds(bits: float, dim: int) -> tuple[float, ...]:
    """Return the midpoints between the centroids that are not negative; the others are their mirror image."""
    upper = _grid(bits) * step(bits, dim)
    return tuple(float(value) for value in (upper[1:] + upper[:-1]) / 2)


def _grid(bits: float) -> Float:
    """Return the centroids that are not negative, in grid steps."""
    middle = [0] if levels(bits) % 2 else []
    return np.array([*middle, *MAGNITUDES[bits]]) + fraction(bits)
