"""A small model with every kind of cache that a policy does not pack, and one with nothing else."""

from __future__ import annotations

from typing import Any

import pytest

TOKENS = [(i * 131 + 7) % 499 for i in range(400)]


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a llama of two layers with random weights."""
    import mlx.core as mx
    from mlx_lm.models import llama

    from daemon.cache import seam

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
