"""What models compute on: asked once for each set of versions, by a process of its own."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from daemon.config.machine import DeviceFacts
from daemon.paths import StateDir
from daemon.supervisor import device

ENVIRON = dict(os.environ)  # noqa: TID251 - the environment of a child
CUDA = {"device": "cuda", "name": "NVIDIA H200", "memory_bytes": 150 * 10**9, "versions": {}}


class Asked:
    """Stands in for subprocess.run, and counts."""

    def __init__(self, output: str = json.dumps(CUDA), code: int = 0) -> None:
        self.count = 0
        self._output, self._code = output, code

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.count += 1
        if self._code:
            raise subprocess.CalledProcessError(self._code, command, stderr="a\nno driver")
        return subprocess.CompletedProcess(command, 0, self._output, "")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.setattr("daemon.supervisor.environment.computes_on_cpu", lambda: False)
    return StateDir(tmp_path / "state")


def test_the_answer_is_kept_until_something_it_depends_on_changes(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    monkeypatch.setattr(subprocess, "run", asked)
    expected = DeviceFacts("cuda", "NVIDIA H200", 150 * 10**9)
    assert [device.facts(state, {}) for _ in range(2)] == [expected] * 2
    assert asked.count == 1
    assert stat.S_IMODE(state.device.stat().st_mode) == 0o600

    device.facts(state, {"CUDA_VISIBLE_DEVICES": "1"})
    assert asked.count == 2
    monkeypatch.setattr("daemon.supervisor.device.installed", lambda _: {"mlx": "9.9"})
    device.facts(state, {"CUDA_VISIBLE_DEVICES": "1"})
    assert asked.count == 3


@pytest.mark.parametrize("kept", ["[]", "{", '{"depends_on": "x"}'])
def test_a_damaged_answer_is_asked_for_again(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    monkeypatch.setattr(subprocess, "run", Asked())
    state.root.mkdir()
    state.device.write_text(kept)
    assert device.facts(state, {}) is not None


@pytest.mark.parametrize("asked", [Asked(code=1), Asked(output=""), Asked(output='{"name": 1}')])
def test_without_an_answer_the_machine_counts_as_one_without_a_gpu(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    monkeypatch.setattr(subprocess, "run", asked)
    assert device.facts(state, {}) is None
    assert not state.device.exists()


def test_a_machine_without_a_gpu_is_not_asked(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    monkeypatch.setattr(subprocess, "run", asked)
    monkeypatch.setattr("daemon.supervisor.environment.computes_on_cpu", lambda: True)
    assert device.facts(state, {}) is None
    assert asked.count == 0


def test_the_probe_answers_in_these_words() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "daemon.worker.probe"],
        env=ENVIRON | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    found = device.parse(answer.stdout)
    assert found.device in ("cpu", "cuda", "metal")
    assert found.name
