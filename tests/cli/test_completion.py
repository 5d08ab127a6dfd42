"""Completion as a shell does it: the script is run by the shell, and asks the real command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from daemon.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a servers.yaml, and a `tqd` of this checkout on the PATH."""
    (tmp_path / "servers.yaml").write_text(
        "version: 1\nservers:\n"
        "  chat: {model: org/m, port: 8081}\n"
        "  code: {model: org/m, port: 8082}\n"
        "  small: {model: org/m, port: 8083}\n"
    )
    command = tmp_path / "bin" / "tqd"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m daemon "$@"\n')
    command.chmod(0o755)
    return tmp_path


def completed(site: Path, shell: str, script: str) -> list[str]:
    """Return the lines that *script*, run by *shell* in *site*, prints."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (site / "script").write_text(CliRunner().invoke(main, ["completion", shell]).output)
    done = subprocess.run(
        [shell, "-c", script],
        cwd=site,
        env={
            "PATH": f"{site / 'bin'}:{os.defpath}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(site),
            "TERM": "dumb",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes_the_servers_of_the_file_that_is_meant(site: Path) -> None:
    (site / "other.yaml").write_text("version: 1\nservers: {there: {model: org/m, port: 1}}\n")
    script = """
        source ./script
        complete -p tqd > /dev/null || exit
        ask() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _tqd_completion tqd; echo "${COMPREPLY[@]}"
        }
        ask tqd logs c
        ask tqd restart chat c
        ask tqd -c other.yaml start ''
    """
    assert completed(site, "bash", script) == ["chat code", "code", "there"]


def test_fish_completes_servers_with_their_models(site: Path) -> None:
    assert completed(site, "fish", "source ./script; complete -C 'tqd status s'") == [
        "small\torg/m"
    ]


def test_zsh_accepts_its_script(site: Path) -> None:
    script = "autoload -Uz compinit && compinit -u -D && source ./script && print $_comps[tqd]"
    assert completed(site, "zsh", script) == ["_tqd_completion"]


def test_commands_complete_and_a_broken_file_offers_no_servers(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site)
    completer = BashComplete(main, {}, "tqd", "_TQD_COMPLETE")

    def offered(*words: str) -> list[str]:
        return [it.value for it in completer.get_completions(list(words[:-1]), words[-1])]

    assert offered("comp") == ["completion"]
    assert offered("logs", "") == ["chat", "code", "small"]
    (site / "servers.yaml").write_text("version: 1\nservers: {chat\n")
    assert offered("logs", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"_TQD_COMPLETE={shell}_complete" in done.output
