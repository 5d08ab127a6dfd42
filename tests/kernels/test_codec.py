from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import codebook, codec, rotation
from daemon.policy.schemes import (
    AFFINE4,
    AFFINE8,
    INT8,
    TRELLIS3,
    TURBO2,
    TURBO3,
    TURBO3_5,
    TURBO4,
    TURBO5,
    Codec,
)

# expected relative error of each codec on Gaussian-like coordinates: the codebook's, plus 13 %, 4 %, 2 % and 1 % for
# the unbiased scale (its error is D/(1−D)); int8: uniform steps of absmax/127 with absmax near 3 sigma at 256 values
ERROR = {
    TURBO2: 0.13, TURBO3: 0.0346, TRELLIS3: 0.0217, TURBO3_5: 0.0192, TURBO4: 0.0093, TURBO5: 0.0025, INT8: 5e-5
}  # fmt: skip
TURBO = (TURBO2, TURBO3, TURBO3_5, TURBO4, TURBO5)
AFFINE = (AFFINE8, AFFINE4)


def vectors(count: int, dim: int, *, seed: int = 0, spread: float = 1.0) -> mx.array:
    return mx.random.normal((1, count, dim), key=mx.random.key(seed)) * spread


@pytest.mark.parametrize("kind", ERROR)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_reconstruction_error_is_the_codebooks(kind: Codec, dim: int) -> None:
    x = vectors(512, dim)

    back = codec.reconstruct(*codec.encode(x, kind, "v"), kind, "v")

    assert (mx.sum((back - x) ** 2) / mx.sum(x * x)).item() < ERROR[kind] * 1.1


@pytest.mark.parametrize("kind", [*TURBO, TRELLIS3])
def test_inner_product_with_the_stored_vector_is_unbiased(kind: Codec) -> None:
    """⟨x̂, x⟩ = ‖x‖² for every single vector, up to the rounding of the fp16 scale (2⁻¹¹)."""
    x = vectors(200, 64, spread=3.0)

    back = codec.reconstruct(*codec.encode(x, kind, "k"), kind, "k")

    assert mx.allclose(
        mx.sum(back * x, axis=-1) / mx.sum(x * x, axis=-1), mx.ones((1, 200)), atol=2**-11 + 1e-5
    )


def cosines(u: np.ndarray, codes: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    c = centroids[codes]
    return (u * c).sum(-1) / np.linalg.norm(u, axis=-1) / np.linalg.norm(c, axis=-1)


@pytest.mark.parametrize("kind", TURBO)
def test_codes_are_the_nearest_centroids_of_the_stretch_with_the_smallest_angle(
    kind: Codec,
) -> None:
    x = vectors(50, 64)
    z = np.array(rotation.rotate(x, "k"))[0].astype(np.float64)
    u = z * 8 / np.linalg.norm(z, axis=-1, keepdims=True)
    centroids = codebook.centroids(kind.bits, 64)
    candidates = np.stack(
        [np.abs(u[..., None] * a - centroids).argmin(-1) for a in codec.STRETCHES]
    )
    angles = np.stack([cosines(u, codes, centroids) for codes in candidates])

    codes = np.array(codec.encode(x, kind, "k")[0])[0]

    assert (codes == candidates).all(-1).any(0).all()
    assert np.abs(cosines(u, codes, centroids) - angles.max(0)).max() < 1e-6


@pytest.mark.parametrize(("kind", "dim", "share"), [(TURBO3, 64, 0.93), (TURBO4, 64, 0.83), (TURBO4, 128, 0.89), (TURBO5, 64, 0.78)])  # fmt: skip
def test_the_stretch_takes_a_share_off_the_error_of_plain_rounding(
    kind: Codec, dim: int, share: float
) -> None:
    x = vectors(1024, dim)
    z = np.array(rotation.rotate(x, "v"))[0].astype(np.float64)
    u = z * dim**0.5 / np.linalg.norm(z, axis=-1, keepdims=True)
    centroids = codebook.centroids(kind.bits, dim)
    plain = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, u)

    codes = np.array(codec.encode(x, kind, "v")[0])[0]

    def lost(these: np.ndarray) -> float:
        return float((1 - cosines(u, these, centroids) ** 2).mean())

    assert lost(codes) < share * lost(plain)


@pytest.mark.parametrize("kind", [*ERROR, *AFFINE])
def test_zero_vectors_stay_zero(kind: Codec) -> None:
    codes, scales = codec.encode(mx.zeros((2, 3, 64)), kind, "k")

    assert mx.all(codec.reconstruct(codes, scales, kind, "k") == 0)


@pytest.mark.parametrize("kind", ERROR)
@pytest.mark.parametrize("norm", [1e-3, 1.0, 779.0, 65504.0, 2e5])
def test_any_length_of_vector_keeps_its_direction(kind: Codec, norm: float) -> None:
    """Qwen2.5 keys have norms of several hundred; an fp16 square would overflow at 256."""
    x = vectors(16, 64)
    x = x / mx.linalg.norm(x, axis=-1, keepdims=True) * norm

    back = codec.reconstruct(*codec.encode(x, kind, "k"), kind, "k")

    assert mx.all(mx.isfinite(back))
    assert (mx.sum((back - x) ** 2) / mx.sum(x * x)).item() < ERROR[kind] * 1.5


@pytest.mark.parametrize("kind", ERROR)
def test_one_huge_channel_does_not_drown_the_others(kind: Codec) -> None:
    x = np.random.default_rng(0).standard_normal((1, 64, 64)).astype(np.float32)
    x[..., 7] *= 300

    back = codec.reconstruct(*codec.encode(mx.array(x), kind, "k"), kind, "k")

    relative = np.square(np.array(back) - x).sum() / np.square(x).sum()
    assert relative < ERROR[kind] * 2


@pytest.mark.parametrize("kind", TURBO)
@pytest.mark.parametrize("dim", [64, 96])
def test_codes_decode_to_the_canonical_centroids(kind: Codec, dim: int) -> None:
    """Bit by bit: the compiled chains leave nothing of their own arithmetic in the numbers."""
    count = codebook.levels(kind.bits)
    codes = mx.array(np.resize(np.arange(count, dtype=np.uint8), (1, count, dim)))

    values, factors = codec.decode(codes, mx.ones((1, count), dtype=mx.float16), kind)

    centroids = codebook.centroids(kind.bits, dim)
    whole = np.rint(2 * centroids / codebook.step(kind.bits, dim)) / 2
    assert np.array_equal(np.array(values), whole[np.array(codes)])
    assert mx.all(factors == codebook.step(kind.bits, dim)).item()


@pytest.mark.parametrize("kind", AFFINE)
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (128, 64), (96, 32), (32, 32)])
def test_affine_is_mlx_quantization(kind: Codec, dim: int, group: int) -> None:
    """Scales and biases are fp16 here: their rounding is all that differs."""
    x = vectors(64, dim, spread=5.0) + 3.0
    expected = mx.dequantize(*mx.quantize(x, group, int(kind.bits)), group, int(kind.bits))

    codes, scales = codec.encode(x, kind, "k")

    assert scales.shape == (1, 64, 2 * dim // group)
    got = codec.reconstruct(codes, scales, kind, "k")
    assert mx.allclose(got, expected, rtol=2**-10, atol=2**-10 * mx.max(mx.abs(x)).item())
    assert not mx.array_equal(got, x)


@pytest.mark.parametrize("kind", AFFINE)
def test_affine_refuses_vectors_without_groups(kind: Codec) -> None:
    with pytest.raises(ValueError, match="groups of 32"):
        codec.encode(vectors(2, 80), kind, "k")


@pytest.mark.parametrize("kind", AFFINE)
def test_affine_values_beyond_fp16_stay_finite(kind: Codec) -> None:
    back = codec.reconstruct(*codec.encode(vectors(8, 64, spread=1e6), kind, "k"), kind, "k")

    assert mx.all(mx.isfinite(back))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_every_float_dtype_encodes(dtype: mx.Dtype) -> None:
    codes, scales = codec.encode(vectors(4, 64).astype(dtype), TURBO4, "v")

    assert codes.dtype == mx.uint8
    assert scales.dtype == mx.float16


@pytest.mark.parametrize("dim", [64, 128])
def test_error_falls_with_every_half_bit_and_with_the_trellis(dim: int) -> None:
    x = vectors(256, dim)

    errors = []
    kinds = (TURBO2, TURBO3, TRELLIS3, TURBO3_5, TURBO4, TURBO5, INT8)
    assert [kind.precision for kind in kinds] == [2, 3, 3.25, 3.5, 4, 5, 8]
    for kind in kinds:
        back = codec.reconstruct(*codec.encode(x, kind, "v"), kind, "v")
        errors.append(mx.sum((back - x) ** 2).item())

    assert errors == sorted(errors, reverse=True)
