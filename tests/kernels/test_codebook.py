from __future__ import annotations

import numpy as np
import pytest

from daemon.kernels import codebook

# Relative mean squared error of Lloyd-Max on the exact Beta density, by head_dim and bits: converged by an
# independent Lloyd iteration on a 400,000-point grid.
LLOYD_MAX = {
    (64, 2): 0.11453, (64, 3): 0.03339, (64, 4): 0.00913,
    (80, 2): 0.11512, (80, 3): 0.03362, (80, 4): 0.00920,
    (128, 2): 0.11600, (128, 3): 0.03397, (128, 4): 0.00932,
    (256, 2): 0.11674, (256, 3): 0.03426, (256, 4): 0.00941,
}  # fmt: skip


def relative_error(bits: int, dim: int) -> float:
    """Sum (t − nearest centroid)² over a grid of the density that is independent of the one that fitted λ."""
    t = (np.arange(1_000_000) + 0.5) * (np.sqrt(dim) / 1_000_000)
    weight = codebook.beta_density(dim, t)
    centroids = codebook.centroids(bits, dim)[2 ** (bits - 1) :]
    nearest = centroids[np.searchsorted(codebook.thresholds(bits, dim), t)]
    return float((weight * (t - nearest) ** 2).sum() / weight.sum())


@pytest.mark.parametrize(("dim", "bits"), LLOYD_MAX)
def test_error_is_within_one_percent_of_lloyd_max(dim: int, bits: int) -> None:
    error = relative_error(bits, dim)

    assert LLOYD_MAX[dim, bits] * 0.999 <= error <= LLOYD_MAX[dim, bits] * 1.01


@pytest.mark.parametrize("bits", codebook.MAGNITUDES)
def test_polynomial_decodes_every_index_exactly(bits: int) -> None:
    """Rounding absorbs the fit's error in float32 too, so that every backend gets the same integers."""
    u = np.arange(2 ** (bits - 1), dtype=np.float32) + np.float32(0.5)
    value = np.zeros_like(u)
    for coefficient in reversed(codebook.DECODE_POLYNOMIALS[bits]):
        value = value * (u * u) + np.float32(coefficient)

    assert list(np.round(value * u - np.float32(0.5))) == list(codebook.MAGNITUDES[bits])


def test_centroids_ascend_and_are_symmetric() -> None:
    for bits in codebook.MAGNITUDES:
        centroids = codebook.centroids(bits, 128)

        assert np.all(np.diff(centroids) > 0)
        assert np.array_equal(centroids, -centroids[::-1])


def test_steps_are_pinned() -> None:
    """A stored cache is read back with these: they may never change under one layout version."""
    pinned = {(2, 64): 12335, (3, 64): 17414, (4, 64): 21891, (4, 128): 22173, (3, 256): 17638}

    assert {key: round(codebook.step(*key) * 2**20) for key in pinned} == pinned


@pytest.mark.parametrize(
    ("bits", "dim", "message"), [(7, 64, "no codebook of 7 bits"), (4, 2, "too short")]
)
def test_impossible_codebooks_are_refused(bits: int, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codebook.step(bits, dim)
