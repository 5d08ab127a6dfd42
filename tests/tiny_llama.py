"""A llama that is small enough to be made anew for a test."""

from __future__ import annotations

from typing import Any


def tiny_llama(seed: int, **changes: Any) -> Any:
    """Return a llama with GQA and random weights: four layers of 2 KV heads of 32 values, but for *changes*."""
    import mlx.core as mx
    from mlx_lm.models import llama

    mx.random.seed(seed)
    arguments = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 997,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
    }
    model = llama.Model(llama.ModelArgs(**{**arguments, **changes}))
    mx.eval(model.parameters())
    return model
