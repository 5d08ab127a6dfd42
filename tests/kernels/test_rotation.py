from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import rotation

# the head_dims of mlx-lm's models, one dense size among the Hadamard ones, and two that no Hadamard size divides
DIMS = (32, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("side", ["k", "v"])
def test_unrotate_inverts_rotate(dim: int, side: rotation.Side) -> None:
    x = mx.random.normal((5, dim), key=mx.random.key(dim))

    assert mx.allclose(rotation.unrotate(rotation.rotate(x, side), side), x, atol=2e-5)


@pytest.mark.parametrize("dim", DIMS)
def test_inner_products_survive_rotation(dim: int) -> None:
    x = mx.random.normal((8, dim), key=mx.random.key(1))
    y = mx.random.normal((8, dim), key=mx.random.key(2))

    rotated = rotation.rotate(x, "k") @ rotation.rotate(y, "k").T

    assert mx.allclose(rotated, x @ y.T, atol=1e-4 * dim**0.5)


def test_sizes_that_corrupt_memory_in_mlx_are_not_hadamard() -> None:
    """mx.hadamard_transform accepts these and returns garbage or crashes (mlx 0.32.4)."""
    bad = (12, 20, 28, 60, 72, 144, 240, 288, 576)

    assert [dim for dim in bad if rotation.hadamard_size(dim)] == []


def test_hadamard_sizes_are_products_of_a_factor_and_a_power_of_two() -> None:
    good = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512)

    assert all(rotation.hadamard_size(dim) for dim in good)


def test_keys_and_values_have_signs_of_their_own() -> None:
    x = mx.ones((1, 64))

    assert not mx.allclose(rotation.rotate(x, "k"), rotation.rotate(x, "v"))


def test_signs_are_pinned() -> None:
    """A stored cache is read back with these signs: they may never change under one seed version."""
    drawn = "".join("+" if value > 0 else "-" for value in np.array(rotation.signs(64, "k"))[:16])

    assert drawn == "+--++++++---+-+-"


def test_low_precision_input_is_rotated_in_float32() -> None:
    x = (mx.random.normal((4, 128)) * 100).astype(mx.bfloat16)

    rotated = rotation.rotate(x, "v")

    assert rotated.dtype == mx.float32
    assert mx.allclose(rotation.unrotate(rotated, "v"), x.astype(mx.float32), rtol=1e-5, atol=1e-3)
