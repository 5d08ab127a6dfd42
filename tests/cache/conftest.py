from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen2

from daemon.cache import seam
from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.policy.schemes import parse_scheme
from tests.tiny_llama import tiny_llama

MakeCaches = Callable[..., list[SequenceCache]]


@pytest.fixture(scope="session", autouse=True)
def _seam() -> None:
    seam.install()


@pytest.fixture(scope="session", name="tiny_llama")
def _tiny_llama() -> Any:
    """A llama of four layers with GQA and random weights: 2 KV heads of 32 values."""
    return tiny_llama(7)


@pytest.fixture
def make_caches(tiny_llama: Any) -> MakeCaches:
    def make(scheme: str, **options: Any) -> list[SequenceCache]:
        settings = {"sink_tokens": 4, "tail_tokens": 32, **options}
        return [SequenceCache(Row(parse_scheme(scheme), **settings)) for _ in tiny_llama.layers]

    return make


@pytest.fixture(scope="session", name="biased")
def _biased() -> Any:
    """A model of Qwen2's kind: a large static bias on its keys."""
    mx.random.seed(3)
    model = qwen2.Model(
        qwen2.ModelArgs(
            model_type="qwen2", hidden_size=128, num_hidden_layers=2, intermediate_size=256, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=997, rope_theta=10000, tie_word_embeddings=True,
        )
    )  # fmt: skip
    for layer in model.layers:
        layer.self_attn.k_proj.bias = mx.random.normal((64,)) * 20
    mx.eval(model.parameters())
    return model
