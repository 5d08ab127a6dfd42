"""Where a model's key statistics come from: profile, measurement, checkpoint, or nowhere, with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.cache import calibrate, profile
from daemon.config.wire import WorkerSpec
from daemon.errors import WorkerExit, WorkerExitError
from daemon.policy.spec import CalibrationSource
from daemon.worker import calibration
from daemon.worker import model as model_loading
from daemon.worker.model import LoadedModel
from tests.worker.specs import worker_spec
from tests.worker.tiny_model import write_tiny_model

FINGERPRINT = "f" * 64
CHARACTERS = calibration.CHARACTERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    return tmp_path / "profiles"


def spec_for(folder: Path, profiles: Path | None, **kv: Any) -> WorkerSpec:
    spec = worker_spec()
    return spec.model_copy(
        update={
            "model_path": str(folder),
            "fingerprint": FINGERPRINT,
            "profiles": None if profiles is None else str(profiles),
            "kv": spec.kv.model_copy(update=kv),
        }
    )


def load(spec: WorkerSpec) -> LoadedModel:
    return model_loading.load(spec, lambda *_: None)


def ids(loaded: LoadedModel) -> set[str | None]:
    return {slot.statistics_id for slot in loaded.factory.slots}


def test_the_first_load_measures_and_the_next_one_reads(
    folder: Path, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "CHARACTERS", CHARACTERS)
    first = load(spec_for(folder, profiles))
    monkeypatch.setattr(calibrate, "calibrate", None)  # measuring again would fail
    second = load(spec_for(folder, profiles))

    assert first.kv_report.calibration == "measured on 3,072 tokens of Python's documentation"
    assert second.kv_report.calibration == first.kv_report.calibration
    assert ids(first) == ids(second)
    assert None not in ids(first)
    assert len(list(profiles.glob("*.safetensors"))) == 1


def test_none_measures_nothing(folder: Path, profiles: Path) -> None:
    loaded = load(spec_for(folder, profiles, calibration="none"))

    assert (loaded.kv_report.calibration, ids(loaded)) == ("none", {None})
    assert not profiles.exists()


def test_full_precision_keys_need_no_statistics(folder: Path, profiles: Path) -> None:
    loaded = load(spec_for(folder, profiles, k="fp16"))

    assert loaded.kv_report.calibration == "not needed: no keys are rotated and packed"
    assert not profiles.exists()


def test_a_text_of_ones_own_is_measured_and_named(
    folder: Path, profiles: Path, tmp_path: Path
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)

    loaded = load(spec_for(folder, profiles, calibration=CalibrationSource(text=str(text))))

    assert loaded.kv_report.calibration.endswith("tokens of notes.txt")


def test_a_named_profile_is_used_wherever_it_lies(
    folder: Path, profiles: Path, tmp_path: Path
) -> None:
    measured = load(spec_for(folder, profiles))
    (stored,) = profiles.glob("*.safetensors")
    moved = stored.rename(tmp_path / "mine.safetensors")

    loaded = load(spec_for(folder, None, calibration=CalibrationSource(profile=str(moved))))

    assert ids(loaded) == ids(measured)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"text": "no-such-file.txt"}, "cannot read the calibration text"),
        ({"profile": "no-such-file.safetensors"}, "cannot read the calibration profile"),
    ],
)
def test_what_servers_yaml_names_must_be_there(
    folder: Path, profiles: Path, tmp_path: Path, source: dict[str, str], message: str
) -> None:
    paths = {key: str(tmp_path / name) for key, name in source.items()}

    with pytest.raises(WorkerExitError, match=message) as refusal:
        load(spec_for(folder, profiles, calibration=CalibrationSource(**paths)))

    assert refusal.value.code is WorkerExit.BAD_CONFIG


def test_the_profile_of_another_model_is_refused(folder: Path, profiles: Path) -> None:
    load(spec_for(folder, profiles))
    (stored,) = profiles.glob("*.safetensors")
    other = spec_for(
        folder, profiles, calibration=CalibrationSource(profile=str(stored))
    ).model_copy(update={"fingerprint": "0" * 64})

    with pytest.raises(WorkerExitError, match="of another model"):
        load(other)


@pytest.mark.parametrize("found", ["damaged", "of an older version"])
def test_a_stored_profile_that_cannot_be_read_is_measured_again(
    folder: Path, profiles: Path, found: str
) -> None:
    first = load(spec_for(folder, profiles))
    (stored,) = profiles.glob("*.safetensors")
    if found == "damaged":
        stored.write_bytes(stored.read_bytes()[:-7])
    else:
        stored.write_bytes(stored.read_bytes().replace(b'"version":"2"', b'"version":"1"'))

    again = load(spec_for(folder, profiles))

    assert ids(again) == ids(first)
    assert {profile.load(stored, None).id} == ids(first)


@pytest.mark.parametrize("strict", [False, True])
def test_a_failed_measurement_serves_on_with_the_reason_unless_strict(
    folder: Path, profiles: Path, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("the text was too dull")

    monkeypatch.setattr(calibrate, "calibrate", broken)
    spec = spec_for(folder, profiles, strict=strict)

    if strict:
        with pytest.raises(
            WorkerExitError, match=r"kv\.strict: calibration failed: ArithmeticError"
        ):
            load(spec)
    else:
        loaded = load(spec)
        assert loaded.kv_report.calibration == "none"
        assert (
            loaded.kv_report.warnings[-1]
            == "calibration failed: ArithmeticError: the text was too dull"
        )


def test_a_machine_that_is_too_slow_serves_uncalibrated(
    folder: Path, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.worker.calibration.LIMIT_S", -1.0)

    loaded = load(spec_for(folder, profiles))

    assert loaded.kv_report.warnings[-1] == "calibration failed: it took too long"
    assert not list(profiles.glob("*.safetensors"))


def test_boundary_keys_are_protected_only_where_no_mean_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "qwen", family="qwen2", num_hidden_layers=5)
    spec = spec_for(folder, None, calibration="none", k="turbo5", v="turbo4")

    from_checkpoint = load(spec).kv_report
    monkeypatch.setattr(calibrate, "checkpoint_means", lambda *_: {})
    without = load(spec).kv_report

    assert from_checkpoint.effective == {"turbo5v4": 5}
    assert without.effective == {"turbo8v4": 4, "turbo5v4": 1}
    assert "boundary layer: K int8" in str(without.layers[0].reason)
