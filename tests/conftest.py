from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from daemon import paths

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "vocab_size": 1000,
    "intermediate_size": 1024, "rms_norm_eps": 1e-5,
}  # fmt: skip

# the same examples in every run: a failure is a failure of the change that it came with
settings.register_profile("tqd", derandomize=True, deadline=None)
settings.load_profile("tqd")

MakeModel = Callable[..., Path]


def safetensors(tensor_bytes: int) -> bytes:
    """Return a weight file with one tensor of *tensor_bytes* zeros."""
    tensor = {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [0, tensor_bytes]}
    header = json.dumps({"__metadata__": {"format": "mlx"}, "w": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(tensor_bytes)


@pytest.fixture
def make_model() -> MakeModel:
    """Make a model's folder: config.json of a small llama, changed as asked, and weights unless None."""

    def make(folder: Path, *, weights: int | None = 1000, **config: object) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
        (folder / "tokenizer.json").write_text("{}")
        if weights is not None:
            (folder / "model.safetensors").write_bytes(safetensors(weights))
        return folder

    return make


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The folder of the demo model, made on first use and kept in the cache folder."""
    from daemon.measure import demo_model

    return demo_model.make(paths.cache_dir())


@pytest.fixture(autouse=True)
def _no_settings_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must not see the servers.yaml or the state folder of whoever runs them."""
    for name in ("TQD_CONFIG", "TQD_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
