"""A token budget from servers.yaml to the worker's caches and its report."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from daemon.cache import build
from daemon.config.wire import WorkerSpec
from daemon.errors import WorkerExit, WorkerExitError
from daemon.policy.spec import LayerRule
from daemon.worker import model
from tests.worker.specs import worker_spec
from tests.worker.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def budgeted(folder: Path, *, strict: bool = False, mode: str = "turbo8v4") -> WorkerSpec:
    spec = worker_spec()
    rules = (LayerRule(match=[1], mode=mode, token_budget=128),)
    kv = spec.kv.model_copy(update={"layers": rules, "strict": strict})
    return spec.model_copy(update={"model_path": str(folder), "kv": kv})


def load(spec: WorkerSpec) -> model.LoadedModel:
    return model.load(spec, lambda *_: None)


def test_a_worker_keeps_the_budget_and_says_so(folder: Path) -> None:
    loaded = load(budgeted(folder))
    caches = loaded.factory()

    for start in range(0, 300, 50):
        loaded.model(mx.array([list(range(start, start + 50))]), cache=caches)

    assert [cache.row.dropped for cache in caches] == [0, 128, 0]
    assert [cache.offset for cache in caches] == [300] * 3
    report = loaded.kv_report
    assert report.summary == "turbo8v4 on 3 of 3 layers; 1 keeps 128 tokens"
    assert report.layers[1].reason == "keeps 128 tokens (lossy)"
    assert any("lossy" in warning for warning in report.warnings)
    # two layers of 2 heads of 32 values at 8 + 4 bits and two scales: the third does not grow
    assert report.bytes_per_token == 2 * 2 * (32 * 12 / 8 + 4)


@pytest.mark.parametrize("mode", ["turbo8v4", "fp16"])
def test_strict_refuses_a_budget_that_falls_back(
    mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "probe", lambda _, factory, __: factory.fall_back("a test says so"))

    assert all(slot.plan.token_budget is None for slot in load(budgeted(folder)).factory.slots)
    with pytest.raises(WorkerExitError, match="a test says so") as caught:
        load(budgeted(folder, strict=True, mode=mode))
    assert caught.value.code is WorkerExit.BAD_CONFIG
