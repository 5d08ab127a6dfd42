"""The daemon as a service runs it; systemd is a small program that starts what the unit says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FAKE_SYSTEMCTL = """#!/bin/sh
case "$*" in
*" start "*)
    command=$(sed -n 's/^ExecStart=//p' "$XDG_CONFIG_HOME/systemd/user/tqd.service")
    $command > "$XDG_CONFIG_HOME/journal" 2>&1 < /dev/null &
    ;;
*) echo "$*" >> "$XDG_CONFIG_HOME/calls" ;;
esac
"""


@pytest.fixture
def systemd(site: Any, tmp_path: Path) -> Any:
    """A site whose `systemctl` starts the unit, and nothing else."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(FAKE_SYSTEMCTL)
    program.chmod(0o755)
    config = tmp_path / "config"
    config.mkdir()
    site.environment |= {
        "PATH": f"{program.parent}:{os.defpath}",
        "XDG_CONFIG_HOME": str(config),
    }
    return site


def test_start_goes_through_the_installed_service(systemd: Any) -> None:
    systemd.add("a")
    systemd.write()
    assert systemd.tqd("service", "install", "--no-start").exit_code == 0
    started = systemd.tqd("start", "a")
    assert (started.exit_code, started.stdout) == (0, "started: a\n")
    pid = systemd.client.status()["daemon"]["pid"]
    command = Path(f"/proc/{pid}/cmdline")
    if command.exists():
        assert command.read_bytes().endswith(b"run\0--service\0systemd\0")
    assert not systemd.state.daemon_log.exists()  # the journal has it
    assert systemd.tqd("shutdown").exit_code == 0


def test_a_service_that_ends_at_once_is_explained_by_the_start_that_asked_for_it(
    systemd: Any,
) -> None:
    systemd.add("a")
    systemd.write()
    systemd.tqd("service", "install", "--no-start")
    systemd.write("version: 1\nservers: {a: {modle: x}}\n")
    failed = systemd.tqd("start")
    assert failed.exit_code == 2
    assert "the service ended at once" in failed.stderr
    assert "servers.a.modle: unknown key" in failed.stderr
    assert "its daemon ended for good" in systemd.tqd("service", "status").stdout


def test_a_daemon_that_starting_again_cannot_help_ends_for_good_and_leaves_word(site: Any) -> None:
    """C18: nothing else keeps launchd from starting it again for ever."""

    def refused(words: str, service: str = "launchd", code: int = 0) -> bool:
        ended = site.shell("run", "--service", service)
        said = json.loads(site.state.refused.read_text())["message"]
        return ended.returncode == code and words in said and words in ended.stderr

    site.write("version: 1\nservers: {a: {modle: x}}\n")
    assert refused("unknown key")
    assert refused("unknown key", "systemd", 78)
    site.file.unlink()
    assert refused("there is no such file")

    site.add("a")
    site.write(control=str(site.folder / "not-a-folder" / "tqd.sock"))
    (site.folder / "not-a-folder").touch()
    assert refused("not-a-folder")


def test_a_state_folder_that_cannot_be_used_ends_it_for_good_too(site: Any) -> None:
    site.add("a")
    site.write()
    site.state.root.touch()
    ended = site.shell("run", "--service", "launchd")
    site.state.root.unlink()
    assert ended.returncode == 0
    assert f"the state folder {site.state.root} cannot be used" in ended.stderr


def test_under_launchd_the_daemon_keeps_its_log_itself_and_a_good_start_clears_the_word(
    site: Any,
) -> None:
    site.add("a")
    site.write()
    site.state.refused.parent.mkdir(parents=True)
    site.state.refused.write_text("{}")
    site.run("--service", "launchd")
    site.ready()
    site.until(lambda: "daemon.started" in site.state.daemon_log.read_text(), "the log is written")
    assert not site.state.refused.exists()
