from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from daemon.cache import seam
from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.policy.schemes import parse_scheme

MakeCaches = Callable[..., list[SequenceCache]]


@pytest.fixture(scope="session", autouse=True)
def _seam() -> None:
    seam.install()


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """A llama of four layers with GQA and random weights: 2 KV heads of 32 values."""
    from mlx_lm.models import llama

    mx.random.seed(7)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=128,
            num_hidden_layers=4,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-5,
            vocab_size=997,
            rope_theta=10000,
            tie_word_embeddings=True,
        )
    )
    mx.eval(model.parameters())
    return model


@pytest.fixture
def make_caches(tiny_llama: Any) -> MakeCaches:
    def make(scheme: str, **options: Any) -> list[SequenceCache]:
        settings = {"sink_tokens": 4, "tail_tokens": 32, **options}
        return [SequenceCache(Row(parse_scheme(scheme), **settings)) for _ in tiny_llama.layers]

    return make
