from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daemon.cache import seam
from daemon.cache.row import Row
from daemon.measure import divergence
from daemon.policy.schemes import parse_scheme

TOKENS = [(i * 131 + 7) % 499 for i in range(200)]


@pytest.fixture(scope="module")
def model() -> Any:
    import mlx.core as mx
    from mlx_lm.models import llama

    seam.install()
    mx.random.seed(5)
    made = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-5,
            vocab_size=499,
            rope_theta=10000,
            tie_word_embeddings=True,
        )
    )
    mx.eval(made.parameters())
    return made


def row(scheme: str) -> divergence.MakeRow:
    return lambda _: Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=32)


def test_the_unpacked_cache_does_not_diverge_and_fewer_bits_diverge_more(model: Any) -> None:
    windows = [divergence.prefill(model, TOKENS[start:], prompt=120, score=8) for start in (0, 50)]
    reference = divergence.decode(model, windows, row("fp16"))

    means = [
        divergence.compare(reference, divergence.decode(model, windows, row(scheme))).mean
        for scheme in ("fp16", "int8", "turbo4v4", "turbo3v3", "turbo2v2")
    ]

    assert means[0] == 0
    assert means == sorted(means)
    assert means[1] > 0


def test_figures_are_those_of_known_distributions() -> None:
    """KL((½, ½) ‖ (¼, ¾)) = ½·ln(4/3) = 0.1438 nats."""
    half, quarter = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    reference = np.array([[half, half], [half, half]])
    quantized = np.array([[half, quarter], [half, half]])

    got = divergence.compare(reference, quantized)

    assert got.positions == 4
    assert got.mean == pytest.approx(0.5 * np.log(4 / 3) / 4)
    assert got.median == pytest.approx(0)
    assert got.top1_agreement == 0.75
    assert got.window_means == pytest.approx((0.5 * np.log(4 / 3) / 2, 0))
    assert got.standard_error > 0


def test_a_window_that_is_too_short_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="a window needs 300 tokens and has 200"):
        divergence.prefill(model, TOKENS, prompt=200, score=100)
