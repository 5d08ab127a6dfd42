from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.kernels import codec, rotation, trellis
from daemon.policy.schemes import TRELLIS3, TURBO3

Codes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float64]

# m of the levels above zero; those below are their bitwise complements
POSITIVE = (
    0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 29, 32, 35, 38, 41, 44, 47, 50, 53, 56, 59, 62, 65, 68, 71,
    74, 77, 80, 83, 87, 91, 95, 99, 103, 107, 111, 115, 119, 123, 127,
)  # fmt: skip


def decoded_slowly(codes: Codes) -> list[int]:
    """Return the number on the grid of each code of one vector, by the definition."""
    numbers = []
    once, twice = int(codes[-1]), int(codes[-2])
    for code in map(int, codes):
        q = 8 * code + (13 * once + 8 * twice + 16) % 32
        numbers.append(POSITIVE[q - 44] if q >= 44 else ~POSITIVE[43 - q])
        once, twice = code, once
    return numbers


def coded_slowly(u: Float, last: tuple[int, int]) -> Codes:
    """Return the codes of the least squared error for one vector that ends in the codes *last*, or in their like.

    Every pair of codes, step by step.
    """
    levels = np.array([~m for m in reversed(POSITIVE)] + list(POSITIVE)) + 0.5
    levels *= trellis.STEP
    once, twice = np.divmod(np.arange(64), 8)  # a pair of codes, the newer one first
    alike = (once == last[1]) & (twice % 4 == last[0] % 4)
    cost = np.where(alike, 0.0, np.inf)
    back = []
    for value in u:
        shift = (13 * once + 8 * twice + 16) % 32
        error = cost[:, None] + (value - levels[8 * np.arange(8) + shift[:, None]]) ** 2
        by_pair = error.reshape(8, 8, 8)  # once, twice, code
        back.append(by_pair.argmin(axis=1))
        cost = by_pair.min(axis=1).T.reshape(-1)  # code, once
    pair = int(np.where(alike, cost, np.inf).argmin())
    codes = []
    for best in reversed(back):
        code, before = divmod(pair, 8)
        codes.append(code)
        pair = before * 8 + int(best[before, code])
    return np.array(codes[::-1], dtype=np.uint8)


def vectors(count: int, dim: int, seed: int = 0) -> Float:
    x = np.random.default_rng(seed).standard_normal((count, dim))
    return x * dim**0.5 / np.linalg.norm(x, axis=1, keepdims=True)


def error(u: Float, codes: Codes) -> Float:
    values = (np.array([decoded_slowly(row) for row in codes]) + 0.5) * trellis.STEP
    return np.asarray(((u - values) ** 2).sum(axis=1))


def lost(u: Float, codes: Codes) -> float:
    """Return 1 − cos² between vectors and their codes, what no scale can repair."""
    values = np.array([decoded_slowly(row) for row in codes]) + 0.5
    along = (u * values).sum(axis=1) ** 2
    return float((1 - along / (u * u).sum(axis=1) / (values * values).sum(axis=1)).mean())


def test_levels_are_the_canonical_ones() -> None:
    whole = np.rint(trellis.levels() / trellis.STEP - trellis.FRACTION).astype(int)

    assert whole.tolist() == [~m for m in reversed(POSITIVE)] + list(POSITIVE)
    assert trellis.STEP * 2**20 == 24012


@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([8, 64, 80])), seed=st.integers(0, 2**32 - 1))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_codes_decode_by_the_definition(shape: tuple[int, int, int], seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 8, shape).astype(np.uint8)

    got = np.array(trellis.grid(mx.array(codes)).view(mx.int8)).reshape(-1, shape[-1])

    expected = [decoded_slowly(row) for row in codes.reshape(-1, shape[-1])]
    assert got.tolist() == expected


def test_codes_of_a_part_of_an_array_decode_too() -> None:
    """As a reader sees them that cuts tokens out of a tile."""
    codes = mx.random.randint(0, 8, (2, 9, 16), key=mx.random.key(1)).astype(mx.uint8)

    part = trellis.grid(codes[:, 3:8])

    assert mx.array_equal(part, trellis.grid(codes)[:, 3:8])


@pytest.mark.parametrize("dim", [8, 64, 80])
def test_no_codes_that_end_alike_are_closer(dim: int) -> None:
    """Viterbi's algorithm is exact; costs are rounded to 2⁻¹⁵ of a square."""
    u = vectors(40, dim, seed=dim)

    codes = np.array(trellis.encode(mx.array(u.astype(np.float32))))

    least = np.stack(
        [coded_slowly(row, (ours[-2], ours[-1])) for row, ours in zip(u, codes, strict=True)]
    )
    assert np.abs(error(u, codes) - error(u, least)).max() < dim * 2**-14


def test_the_end_is_chosen_well() -> None:
    """Within 3 % of the best of all 32 ends."""
    u = vectors(16, 64, seed=5)

    codes = np.array(trellis.encode(mx.array(u.astype(np.float32))))

    ends = [(twice, once) for twice in range(4) for once in range(8)]
    best = np.stack([error(u, np.stack([coded_slowly(row, end) for row in u])) for end in ends])
    assert error(u, codes).mean() < 1.03 * best.min(axis=0).mean()


def test_blocks_give_what_single_vectors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    u = mx.array(vectors(11, 16).astype(np.float32)).reshape(1, 11, 16)
    whole = trellis.encode(u)
    monkeypatch.setattr(trellis, "_BLOCK", 3)

    assert whole.shape == u.shape
    assert mx.array_equal(trellis.encode(u), whole)


def test_values_beyond_all_levels_get_the_last_one() -> None:
    """One coordinate that is everything: √512 standard deviations, at the beginning, in the middle, at the end."""
    u = np.zeros((3, 512), dtype=np.float32)
    u[0, 0], u[1, 200], u[2, 511] = 512**0.5, -(512**0.5), 512**0.5

    codes = np.array(trellis.encode(mx.array(u)))

    numbers = [decoded_slowly(row) for row in codes]
    assert (numbers[0][0], numbers[1][200], numbers[2][511]) == (127, ~127, 127)
    assert np.abs(np.delete(numbers[1], 200)).max() < 40


# relative error 1 − cos² of Gaussian vectors, the table of ADR 21
@pytest.mark.parametrize(("dim", "expected"), [(64, 0.0208), (128, 0.0211)])
def test_the_error_is_the_one_that_was_measured(dim: int, expected: float) -> None:
    x = mx.array(vectors(1500, dim).astype(np.float32))[None]
    u = np.array(rotation.rotate(x, "v"), dtype=np.float64)[0]

    codes, _ = codec.encode(x, TRELLIS3, "v")
    assert lost(u, np.array(codes)[0]) == pytest.approx(expected, rel=0.02)

    plain = codec.reconstruct(*codec.encode(x, TURBO3, "v"), TURBO3, "v")
    coded = codec.reconstruct(*codec.encode(x, TRELLIS3, "v"), TRELLIS3, "v")
    errors = [mx.sum((back - x) ** 2).item() for back in (coded, plain)]
    assert errors[0] < 0.7 * errors[1]
