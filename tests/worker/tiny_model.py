"""A whole model folder with random weights, written in a moment: for loading tests and for the engine."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def write_tiny_model(folder: Path, *, family: str = "llama", **changes: Any) -> Path:
    """Write config, weights and tokenizer of a small model of *family* to *folder* and return it."""
    from tests.worker.small_tokenizer import small_tokenizer

    config = {**CONFIG, "model_type": family, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(11)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    small_tokenizer()._tokenizer.save_pretrained(str(folder))
    return folder
