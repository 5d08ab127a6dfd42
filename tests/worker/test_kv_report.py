"""What runs attention in a loaded model: chosen by layer, reported with its reason, warned about once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from daemon.cache import backends
from daemon.kernels.attention import Attention
from daemon.kernels.backend import Choice
from daemon.policy.spec import LayerRule
from daemon.worker import model as worker_model
from daemon.worker.model import LoadedModel
from tests.kernels.fake_kernels import FakeKernels, not_compiled
from tests.kernels.fake_stepping import FakeStepping
from tests.worker.specs import worker_spec
from tests.worker.tiny_model import write_tiny_model


def load(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: FakeKernels,
    stepping: FakeStepping | None = None,
    **kv: object,
) -> LoadedModel:
    attention = Attention("cuda", kernels, stepping=stepping)
    monkeypatch.setattr(worker_model, "on_this_device", lambda: attention)
    spec = worker_spec()
    changed = {
        "model_path": str(write_tiny_model(folder, num_hidden_layers=4)),
        "kv": spec.kv.model_copy(update={"calibration": "none", **kv}),
    }
    return worker_model.load(spec.model_copy(update=changed), lambda *_: None)


def decoded(loaded: LoadedModel) -> mx.array:
    """Return the logits of one token after 80 others."""
    cache = loaded.model.make_cache()
    loaded.model((mx.arange(80) % 300)[None], cache=cache)
    logits: mx.array = loaded.model(mx.array([[7]]), cache=cache)
    return logits


def test_proven_kernels_attend_and_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = FakeKernels()
    loaded = load(tmp_path / "m", monkeypatch, kernels)

    assert loaded.kv_report.backend == "cuda"
    (group,) = loaded.kv_report.layers
    assert (group.backend, group.backend_reason) == ("cuda", None)
    proven = len(kernels.calls)
    assert proven == 2  # two samples; four layers alike
    decoded(loaded)
    assert len(kernels.calls) == proven + 4


def test_kernels_that_do_not_compile_give_one_warning_and_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = load(tmp_path / "a", monkeypatch, FakeKernels(not_compiled))
    fine = load(tmp_path / "b", monkeypatch, FakeKernels())

    report = broken.kv_report
    assert report.backend == "reference"
    (group,) = report.layers
    assert (group.effective, group.backend) == ("turbo8v4", "reference")
    assert group.backend_reason is not None
    assert "nvrtc: error" in group.backend_reason
    (warning,) = [text for text in report.warnings if "kernels" in text]
    assert warning == f"{group.backend_reason}; the reference runs instead, which is slower"
    assert mx.array_equal(decoded(broken), decoded(fine))


def test_steps_of_as_many_rows_as_are_served_prove_themselves_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping = FakeStepping(most=64)
    loaded = load(tmp_path / "m", monkeypatch, FakeKernels(), stepping)

    assert stepping.calls == [1, 3]  # for one sequence and for several; four layers alike
    assert loaded.kv_report.layers[0].backend_reason is None
    decoded(loaded)
    assert stepping.calls == [1, 3] + 4 * [1]


def test_steps_of_several_rows_that_are_wrong_give_one_warning_and_rows_go_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping = FakeStepping(most=64, spoil=lambda out, plain: (2 * out, plain))
    broken = load(tmp_path / "a", monkeypatch, FakeKernels(), stepping)
    fine = load(tmp_path / "b", monkeypatch, FakeKernels())

    (group,) = broken.kv_report.layers
    assert group.backend == "cuda"
    assert "disagree with the reference" in (group.backend_reason or "")
    (warning,) = [text for text in broken.kv_report.warnings if "kernels" in text]
    assert warning.endswith("; rows are decoded one by one instead, which is slower")
    proven = len(stepping.calls)
    assert mx.array_equal(decoded(broken), decoded(fine))
    assert len(stepping.calls) == proven


def test_layers_are_told_apart_by_what_attends_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = FakeKernels(refuse=lambda case: "no 2-bit values" if case.v.bits == 2 else None)
    rules = (LayerRule(match="1-1", mode="turbo8v2"), LayerRule(match="3-3", mode="fp16"))
    loaded = load(tmp_path / "m", monkeypatch, kernels, layers=rules)

    report = loaded.kv_report
    assert [(group.first, group.last, group.backend) for group in report.layers] == [
        (0, 0, "cuda"), (1, 1, "reference"), (2, 2, "cuda"), (3, 3, "mlx"),
    ]  # fmt: skip
    assert report.layers[1].backend_reason == "no 2-bit values"
    assert report.backend == "cuda, reference"
    assert not [text for text in report.warnings if "kernels" in text]


def test_what_packs_is_reported_and_a_kernel_that_fails_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Choice("reference", "the metal kernels fail to encode on this device", failed=True)
    chosen = SimpleNamespace(choice=lambda it: failed if it.v.bits == 2 else Choice("metal"))
    monkeypatch.setattr(backends, "encode", chosen)
    rules = (LayerRule(match="1-1", mode="turbo8v2"), LayerRule(match="3-3", mode="fp16"))
    report = load(tmp_path / "m", monkeypatch, FakeKernels(), layers=rules).kv_report

    assert (report.backend, report.packing_backend) == ("cuda", "metal, reference")
    assert [(it.first, it.last, it.packing_backend, it.packing_reason) for it in report.layers] == [
        (0, 0, "metal", None), (1, 1, "reference", failed.reason), (2, 2, "metal", None), (3, 3, "mlx", None),
    ]  # fmt: skip
    (warning,) = [text for text in report.warnings if "kernels" in text]
    assert warning == f"{failed.reason}; the reference runs instead, which is slower"
