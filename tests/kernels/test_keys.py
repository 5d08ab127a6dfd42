from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import internlm3, rope_utils

from daemon.kernels.keys import KeyTransform, Rotary, RotaryError

DIM = 64

ROPES: dict[str, Any] = {
    "half-split": lambda: nn.RoPE(DIM),
    "traditional": lambda: nn.RoPE(DIM, traditional=True),
    "large base": lambda: nn.RoPE(DIM, base=1e6),
    "partial": lambda: nn.RoPE(32),
    "partial traditional": lambda: nn.RoPE(16, traditional=True),
    "llama3": lambda: rope_utils.Llama3RoPE(
        DIM,
        8192,
        scaling_config={
            "factor": 8.0,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    ),
    "yarn": lambda: rope_utils.YarnRoPE(DIM, scaling_factor=4.0),
    "su": lambda: rope_utils.SuScaledRoPE(
        DIM,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        long_factor=[1 + i / 10 for i in range(32)],
    ),
    "proportional": lambda: rope_utils.ProportionalRoPE(DIM, 32),
}


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("start", [0, 37, 5000])
def test_the_bias_is_the_score_of_the_rotated_mean(name: str, start: int) -> None:
    """q·RoPE_p(μ) from a table of cosines equals the product with the module's own output, at every position."""
    rope = ROPES[name]()
    mean, queries = normal(3, DIM, seed=1), normal(3, 5, DIM, seed=2)
    transform = KeyTransform(mx.ones((3, DIM)), mean, Rotary(rope, DIM))
    tokens = mx.broadcast_to(mean[None, :, None], (1, 3, 40, DIM))

    bias = transform.bias(queries, start, start + 40)

    expected = queries @ rope(mx.contiguous(tokens), offset=start)[0].swapaxes(-1, -2)
    assert bias is not None
    assert mx.allclose(bias, expected, atol=2e-4)


@pytest.mark.parametrize("name", ROPES)
def test_restored_undoes_centered(name: str) -> None:
    transform = KeyTransform(
        mx.abs(normal(2, DIM, seed=3)) + 0.1, normal(2, DIM, seed=4), Rotary(ROPES[name](), DIM)
    )
    keys = normal(2, 17, DIM, seed=5)

    assert mx.allclose(transform.restored(transform.centered(keys, 100), 100), keys, atol=1e-4)


@pytest.mark.parametrize("name", [*ROPES, None])
@pytest.mark.parametrize("mean", [True, False])
def test_scores_are_unchanged_by_the_transform(name: str | None, mean: bool) -> None:
    """⟨s∘q, z⟩ + bias = q·k exactly: only what gets rounded changes, not what is meant."""
    rotary = Rotary(ROPES[name](), DIM) if name else None
    transform = KeyTransform(
        mx.abs(normal(2, DIM, seed=6)) + 0.1, normal(2, DIM, seed=7) if mean else None, rotary
    )
    keys, queries = normal(2, 30, DIM, seed=8), normal(2, 4, DIM, seed=9)

    scores = transform.scaled(queries) @ transform.centered(keys, 11).swapaxes(-1, -2)
    bias = transform.bias(queries, 11, 41)

    got = scores if bias is None else scores + bias
    assert mx.allclose(got, queries @ keys.swapaxes(-1, -2), atol=1e-3)


def test_embeddings_that_do_more_than_rotate_pairs_are_refused() -> None:
    def mixing(x: mx.array, offset: int = 0) -> mx.array:
        return x + mx.roll(x, 1, axis=-1) * offset

    def growing(x: mx.array, offset: int = 0) -> mx.array:
        return nn.RoPE(DIM)(x, offset=offset) * (1 + offset)

    def still(x: mx.array, offset: int = 0) -> mx.array:
        return x

    for rope in (mixing, still):
        with pytest.raises(RotaryError):
            Rotary(rope, DIM)
    # a factor that depends on the position is still a product of pairs: the table holds it
    assert Rotary(growing, DIM).first


@pytest.mark.parametrize("module", [rope_utils, internlm3])
def test_embeddings_whose_angles_depend_on_the_length_of_the_sequence_are_refused(
    module: Any,
) -> None:
    """Dynamic scaling changes the angle of a position when more tokens come: its mean could not be given back."""
    dynamic = {
        rope_utils: lambda: rope_utils.initialize_rope(
            DIM, 1e4, False, {"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=32768
        ),
        internlm3: lambda: internlm3.DynamicNTKScalingRoPE(DIM, 32768, base=1e4, scale=4.0),
    }[module]

    with pytest.raises(RotaryError, match="depend on the tokens"):
        Rotary(dynamic(), DIM)


def test_tables_grow_without_changing() -> None:
    rotary = Rotary(nn.RoPE(DIM), DIM)

    early = mx.array(rotary.table(10, 20))
    rotary.table(0, 5000)

    assert mx.array_equal(rotary.table(10, 20), early)


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_products_are_those_with_the_rows_of_the_table(rows: int) -> None:
    """From any position to any other, for few rows and for many, also when the table has grown meanwhile."""
    rotary = Rotary(nn.RoPE(DIM // 2), DIM)
    coefficients = normal(rows, rotary.table(0, 1).shape[1], seed=10)

    for start, end in ((0, 1), (5, 300), (256, 512), (700, 1024), (1000, 1100), (255, 2049)):
        got = rotary.products(coefficients, start, end)

        assert got.shape == (rows, end - start)
        assert mx.allclose(got, coefficients @ rotary.table(start, end).T, atol=1e-4)


def test_equal_embeddings_have_equal_signatures() -> None:
    one, same, other = (
        Rotary(nn.RoPE(DIM), DIM),
        Rotary(nn.RoPE(DIM), DIM),
        Rotary(nn.RoPE(DIM, base=500.0), DIM),
    )

    assert one.signature == same.signature != other.signature
