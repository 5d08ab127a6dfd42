from __future__ import annotations

import numpy as np
import pytest

from daemon.kernels import codebook

# Relative mean squared error of Lloyd-Max on the exact Beta density, by head_dim and bits: converged by an
# independent Lloyd iteration on a 400,000-point grid.
LLOYD_MAX = {
    (64, 2): 0.114526, (64, 3): 0.033391, (64, 3.5): 0.018522, (64, 4): 0.009132, (64, 5): 0.002399,
    (80, 2): 0.115115, (80, 3): 0.033620, (80, 3.5): 0.018660, (80, 4): 0.009204, (80, 5): 0.002420,
    (128, 2): 0.116000, (128, 3): 0.033966, (128, 3.5): 0.018868, (128, 4): 0.009315, (128, 5): 0.002451,
    (256, 2): 0.116740, (256, 3): 0.034256, (256, 3.5): 0.019043, (256, 4): 0.009408, (256, 5): 0.002478,
}  # fmt: skip
EXCESS = {2: 1.01, 3: 1.01, 3.5: 1.01, 4: 1.01, 5: 1.02}


def relative_error(bits: float, dim: int) -> float:
    """Sum (t − nearest centroid)² over a grid of the density that is independent of the one that fitted λ."""
    t = (np.arange(1_000_000) + 0.5) * (np.sqrt(dim) / 1_000_000)
    weight = codebook.beta_density(dim, t)
    centroids = codebook.centroids(bits, dim)
    centroids = centroids[centroids >= 0]
    nearest = centroids[np.searchsorted(codebook.thresholds(bits, dim), t)]
    return float((weight * (t - nearest) ** 2).sum() / weight.sum())


@pytest.mark.parametrize(("dim", "bits"), LLOYD_MAX)
def test_error_is_close_to_that_of_lloyd_max(dim: int, bits: float) -> None:
    error = relative_error(bits, dim)

    assert LLOYD_MAX[dim, bits] * 0.9999 <= error <= LLOYD_MAX[dim, bits] * EXCESS[bits]


def lloyd_max(bits: float, dim: int) -> float:
    """Return the relative error of the codebook that Lloyd's iteration ends in, on the density of *dim* values."""
    t = (np.arange(20_000) + 0.5) * (np.sqrt(dim) / 20_000)
    t = np.concatenate([-t[::-1], t])
    weight = codebook.beta_density(dim, np.abs(t))
    mass, moment = np.cumsum(weight), np.cumsum(weight * t)
    centroids = codebook.centroids(
        bits, dim
    )  # begin near the end: what it ends in does not depend on it
    for _ in range(600):
        edges = np.searchsorted(t, (centroids[1:] + centroids[:-1]) / 2)
        at = np.array([0, *edges, len(t)]) - 1
        cells, sums = (np.diff(np.where(at < 0, 0.0, total[at])) for total in (mass, moment))
        centroids = sums / cells
    nearest = centroids[np.searchsorted((centroids[1:] + centroids[:-1]) / 2, t)]
    return float((weight * (t - nearest) ** 2).sum() / (weight * t * t).sum())


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256, 512, 576])
@pytest.mark.parametrize("bits", codebook.MAGNITUDES)
def test_error_is_close_to_that_of_a_computed_lloyd_max(dim: int, bits: float) -> None:
    """For every head_dim of mlx-lm's models, against Lloyd's own iteration."""
    best = lloyd_max(bits, dim)

    assert best * 0.999 <= relative_error(bits, dim) <= best * EXCESS[bits]


@pytest.mark.parametrize("bits", codebook.MAGNITUDES)
def test_centroids_are_bytes_on_the_grid(bits: float) -> None:
    grid = codebook.centroids(bits, 128) / codebook.step(bits, 128) - codebook.fraction(bits)

    assert np.allclose(grid, np.round(grid), atol=1e-9)
    assert (grid.min(), grid.max()) == (-127 - (codebook.fraction(bits) > 0), 127)


def test_only_an_odd_number_of_levels_has_one_at_zero() -> None:
    zeros = {bits: (codebook.centroids(bits, 64) == 0).sum() for bits in codebook.MAGNITUDES}

    assert zeros == {2: 0, 3: 0, 3.5: 1, 4: 0, 5: 0}
    assert {bits: codebook.levels(bits) for bits in zeros} == {2: 4, 3: 8, 3.5: 11, 4: 16, 5: 32}


def test_centroids_ascend_and_are_symmetric() -> None:
    for bits in codebook.MAGNITUDES:
        centroids = codebook.centroids(bits, 128)

        assert np.all(np.diff(centroids) > 0)
        assert np.array_equal(centroids, -centroids[::-1])


def test_steps_are_pinned() -> None:
    """A stored cache is read back with these: they may never change under one layout version."""
    pinned = {
        (2, 64): 12335, (3, 64): 17414, (4, 64): 21891, (4, 128): 22173, (3, 256): 17638,
        (3.5, 64): 19565, (3.5, 128): 19771, (5, 64): 25682, (5, 128): 26100,
    }  # fmt: skip

    assert {key: round(codebook.step(*key) * 2**20) for key in pinned} == pinned


@pytest.mark.parametrize(
    ("bits", "dim", "message"), [(7, 64, "no codebook of 7 bits"), (4, 2, "too short")]
)
def test_impossible_codebooks_are_refused(bits: int, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codebook.step(bits, dim)
