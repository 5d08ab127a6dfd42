from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.service.unit import Paths

FakeProgram = Callable[[str, str], Path]


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProgram:
    """Put a shell script on the PATH that answers as told; return the file of the calls it got."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.defpath}")

    def make(name: str, answers: str) -> Path:
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "$*" >> {calls}\ncase "$*" in\n{answers}\nesac\n')
        program.chmod(0o755)
        return calls

    return make


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(
        python="/opt/venv/bin/python",
        config=Path("/home/ann/models/servers.yaml"),
        state=Path("/home/ann/.local/state/tqd"),
        home=Path("/home/ann"),
        environment={"PATH": "/usr/bin:/bin", "HF_HOME": "/home/ann/.cache/huggingface"},
        stop_s=120,
        user="ann",
    )


@pytest.fixture
def odd_paths(paths: Paths) -> Paths:
    """Paths that a careless quoting breaks."""
    odd = Path('/home/ann/My "100%" & <models>/$HOME\'s')
    return Paths(
        python=f"{odd.parent}/venv/bin/python",
        config=odd / "servers.yaml",
        state=odd / "state",
        home=paths.home,
        environment={"PATH": f"/usr/bin:{odd.parent}", "HF_HOME": str(odd)},
        stop_s=120,
        user="ann",
    )
