"""The rivals must be what was published: a weak imitation would flatter our own schemes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.bench.rivals import RIVALS, Rival, RivalRow, _levels, affine, kivi, turbo

HEADS, DIM = 2, 64


def vectors(count: int, seed: int = 3) -> mx.array:
    mx.random.seed(seed)
    return mx.random.normal((HEADS, count, DIM))


def error(restored: mx.array, exact: mx.array) -> float:
    return float((mx.sum((restored - exact) ** 2) / mx.sum(exact**2)).item())


@pytest.mark.parametrize(("bits", "published"), [(2, 0.11453), (3, 0.03339), (4, 0.00913)])
def test_the_codebook_has_the_error_of_lloyd_max(bits: int, published: float) -> None:
    """Relative mean squared error at head_dim 64; the raw norm shrinks each vector, as published."""
    exact = vectors(4000)
    assert error(turbo(bits, "v")()(exact), exact) == pytest.approx(published, rel=0.03)
    levels, _ = _levels(bits, DIM)
    assert np.allclose(levels, -np.array(levels)[::-1], atol=2e-5)


def test_calibrated_keys_have_their_own_norm() -> None:
    exact = vectors(200)
    restored = turbo(4, "k", calibrated=True)()(exact)
    ratio = mx.linalg.norm(restored, axis=-1) / mx.linalg.norm(exact, axis=-1)
    assert mx.max(mx.abs(ratio - 1)).item() < 1e-3


def test_affine_is_what_mlx_quantizes() -> None:
    exact = vectors(10)
    packed = mx.quantize(exact, group_size=64, bits=8)
    assert mx.array_equal(affine(8)()(exact), mx.dequantize(*packed, group_size=64, bits=8)).item()


def test_kivi_keys_are_exact_at_the_ends_of_each_channel_and_values_of_each_group() -> None:
    exact = vectors(32)
    keys = kivi(2, "k")()(exact)
    assert mx.allclose(mx.max(keys, axis=1), mx.max(exact, axis=1), atol=5e-3).item()
    values = kivi(2, "v")()(exact).reshape(HEADS, 32, 2, 32)
    assert mx.allclose(
        mx.max(values, -1), mx.max(exact.reshape(values.shape), -1), atol=5e-3
    ).item()


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_with_sinks_and_tail_only_what_left_the_tail_is_stored(rival: Rival) -> None:
    exact = vectors(300)
    row = rival.row(10, 30, with_tail=True)
    for start in range(0, 300, 100):
        row.append(exact[:, start : start + 100], exact[:, start : start + 100])
    row.pack()
    got = row.stored().k.joined()
    same = mx.all(got == exact, axis=(0, 2)).tolist()
    # 300 - 32 = 268: whole tiles up to 256
    assert same == [token < 4 or token >= 256 for token in range(300)]


def test_as_shipped_even_the_newest_token_is_stored() -> None:
    exact = vectors(5)
    row = RIVALS[0].row(10, 30, with_tail=False)
    row.append(exact, exact)
    assert not mx.any(mx.all(row.stored().v.joined() == exact, axis=(0, 2))).item()


def test_boundary_layers_are_stored_in_affine_8_bit() -> None:
    (rival,) = (it for it in RIVALS if it.boundary)
    exact = vectors(50)
    errors = []
    for layer in (0, 1, 2, 27, 28, 29):
        row = rival.row(layer, 30, with_tail=False)
        row.append(exact, exact)
        errors.append(error(row.stored().k.joined(), exact))
    assert [value < 1e-4 for value in errors] == [True, True, False, False, True, True]
    # 4 of 30 layers at 8.5 bits
    assert rival.mean_bits(64, 30) == pytest.approx(4.82, abs=0.01)


def test_a_fresh_row_has_a_calibration_of_its_own() -> None:
    (rival,) = (it for it in RIVALS if it.boundary)
    first = rival.row(10, 30, with_tail=False)
    mx.random.seed(0)
    first.append(vectors(100) * mx.exp(mx.random.normal((DIM,))), vectors(100))
    second = first.fresh()
    assert isinstance(second, RivalRow)
    second.append(vectors(100), vectors(100))
    plain = rival.row(10, 30, with_tail=False)
    plain.append(vectors(100), vectors(100))
    assert mx.array_equal(second.stored().k.joined(), plain.stored().k.joined()).item()
