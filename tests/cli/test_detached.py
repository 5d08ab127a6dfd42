"""A daemon that a command starts, as far as it can be told from its process and its answers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.cli import detached
from daemon.errors import TqdError
from daemon.paths import StateDir


class Process:
    """A process that has ended with *returncode*, or lives."""

    def __init__(self, returncode: int | None) -> None:
        self.returncode = returncode

    def poll(self) -> int | None:
        return self.returncode


def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ended: int | None, answers: Iterator[bool]
) -> None:
    def spawn(*_: Any, stdout: Any, **__: Any) -> Process:
        stdout.write(b"tqd: a daemon already runs\n")
        return Process(ended)

    monkeypatch.setattr(subprocess, "Popen", spawn)
    monkeypatch.setattr(detached.Client, "running", lambda _: next(answers))
    detached.start_daemon(folder / "servers.yaml", StateDir(folder / "state"), 10.0)


def test_a_daemon_that_has_answered_once_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, monkeypatch, None, iter([True, False]))


def test_one_that_ends_because_another_runs_already_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, monkeypatch, 1, iter([False, True]))


def test_one_that_ends_says_why_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TqdError, match="a daemon already runs") as refusal:
        start(tmp_path, monkeypatch, 78, iter([False, False]))
    assert refusal.value.exit_code == 78
