"""Loading whole folders: how a family may run, what `strict` refuses, and spellings that mlx-lm does not know."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from daemon.cache import build
from daemon.cache.latent import LatentCache
from daemon.errors import WorkerExit, WorkerExitError
from daemon.policy.spec import LayerRule
from daemon.worker import model as worker_model
from daemon.worker.engine import start_engine
from daemon.worker.model import LoadedModel
from daemon.worker.requests import GenerationRequest, Sampling
from tests.policy.tiny_configs import tiny_config
from tests.worker.specs import worker_spec
from tests.worker.tiny_model import write_tiny_model

# transformers reads config.json for the tokenizer, and mlx-lm's modules want the older key there
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")


def family(folder: Path, name: str, **changes: Any) -> Path:
    return write_tiny_model(
        folder, family=name, **{**tiny_config(name), "vocab_size": 320, **changes}
    )


def load(folder: Path, **kv: Any) -> LoadedModel:
    spec = worker_spec()
    changed = {"model_path": str(folder), "kv": spec.kv.model_copy(update=kv)}
    return worker_model.load(spec.model_copy(update=changed), lambda *_: None)


def test_another_spelling_of_a_family_is_loaded(tmp_path: Path) -> None:
    """Checkpoints say deepseek_v3.2, mlx-lm's module is deepseek_v32."""
    folder = family(tmp_path / "m", "deepseek_v32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3.2"}))

    loaded = load(folder)

    assert loaded.model_report.model_type == "deepseek_v3.2"
    assert loaded.vocab_size == 320
    assert loaded.kv_report.effective == {"fp16": 6}


def test_latents_in_int8_are_reported_as_they_are_stored(tmp_path: Path) -> None:
    loaded = load(
        family(tmp_path / "m", "deepseek_v3"), k="int8", v="int8", explicit=True, strict=True
    )

    (group,) = loaded.kv_report.layers
    assert (group.requested, group.effective) == ("int8", "turbo8v0")
    assert group.reason == "int8 latent; the rotary key stays in full precision"
    assert all(isinstance(cache, LatentCache) for cache in loaded.factory())
    # measured on real buffers: 24 bytes, a scale, and 8 float32 values
    assert loaded.kv_report.bytes_per_token == 6 * (24 + 2 + 8 * 4)


def test_strict_accepts_boundary_layers_as_they_were_asked_for(tmp_path: Path) -> None:
    loaded = load(write_tiny_model(tmp_path / "m", num_hidden_layers=4), boundary_v=1, strict=True)

    assert loaded.kv_report.effective == {"int8": 2, "turbo8v4": 2}


def test_strict_refuses_what_the_loaded_model_cannot_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "probe", lambda _, factory, __: factory.fall_back("a reason"))
    folder = write_tiny_model(tmp_path / "m")

    assert load(folder).kv_report.effective == {"fp16": 3}
    with pytest.raises(
        WorkerExitError, match="layer 0 gets fp16 instead of turbo8v4: a reason"
    ) as caught:
        load(folder, strict=True)
    assert caught.value.code is WorkerExit.BAD_CONFIG


def test_a_model_that_cannot_run_here_is_refused_with_what_it_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> mx.array:
        raise RuntimeError("[GatherMM::eval] Currently only supports float32.\nmore")

    monkeypatch.setattr(build, "probe", broken)

    with pytest.raises(
        WorkerExitError, match=r"cannot run m here: \[GatherMM::eval\] .* float32\.$"
    ):
        load(write_tiny_model(tmp_path / "m"))


@pytest.mark.parametrize("name", ["llama4", "gemma2", "jamba"])
async def test_families_that_mlx_lm_cannot_batch_answer_together_as_alone(
    name: str, tmp_path: Path
) -> None:
    """gemma2 gives wrong numbers in mlx-lm's batches, llama4 none at all, jamba's prompts must not be padded."""
    folder = family(tmp_path / "m", name)
    spec = worker_spec(max_concurrent=3).model_copy(update={"model_path": str(folder)})
    running = start_engine(spec, progress=lambda *_: None, on_failure=lambda _: None)
    requests = [
        GenerationRequest(
            tuple((seed * 31 + i * 7) % 300 + 2 for i in range(length)),
            max_tokens=6,
            sampling=Sampling(temperature=0),
            ignore_eos=True,
        )
        for seed, length in ((1, 5), (2, 70), (3, 40))
    ]

    async def tokens(request: GenerationRequest) -> list[int]:
        return [event.token async for batch in running.engine.submit(request) for event in batch]

    try:
        alone = [await tokens(request) for request in requests]
        together = await asyncio.gather(*(tokens(request) for request in requests))
    finally:
        running.close()
    assert together == alone
    assert [len(answer) for answer in together] == [6, 6, 6]


def test_a_rule_of_layers_packs_some_latents(tmp_path: Path) -> None:
    loaded = load(
        family(tmp_path / "m", "glm4_moe_lite"), layers=(LayerRule(match="0-1", mode="int8"),)
    )

    assert loaded.kv_report.effective == {"turbo8v0": 2, "fp16": 4}
    # mlx-lm makes one mask for all latent layers: those in full precision are ours too
    assert [cache.row.scheme.name for cache in loaded.factory()] == ["turbo8v0"] * 2 + ["fp16"] * 4
