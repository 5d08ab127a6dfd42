from __future__ import annotations

import plistlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daemon.cli.main import main
from daemon.service.launchd import Launchd
from daemon.service.systemd import Systemd
from daemon.service.unit import Scope

Run = Callable[..., Result]


class Site:
    """A servers.yaml, a state folder, and a machine whose service manager only takes notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.file = folder / "servers.yaml"
        self.unit = folder / "config/systemd/user/tqd.service"
        self.file.write_text("version: 1\nservers: {chat: {model: org/m, port: 8081}}\n")
        self.calls.touch()

    def program(self, name: str, answers: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {self.calls}\ncase "$*" in\n{answers}\nesac\n'
        )
        path.chmod(0o755)

    def run(self, *arguments: str, state: str = "state") -> Result:
        place = ("-c", str(self.file), "--state-dir", str(self.folder / state))
        return CliRunner().invoke(main, [*place, "service", *arguments])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path)
    site.program("systemctl", "*show*) printf 'ActiveState=inactive\\nUnitFileState=enabled\\n';;")
    site.program("launchctl", "*) exit 0;;")

    def host(scope: Scope) -> Systemd:
        return Systemd(scope, tmp_path / "config", system_units=tmp_path / "units")

    monkeypatch.setattr("daemon.cli.hosts.host", host)
    monkeypatch.setattr("daemon.cli.service.try_out", lambda paths: None)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:relative:/usr/bin:/usr/bin:/bin")
    return site


def install(site: Site, *arguments: str, **keywords: Any) -> Result:
    return site.run("install", "--no-start", *arguments, **keywords)


def test_install_writes_real_paths_and_enables_the_unit(site: Site) -> None:
    done = install(site)
    assert done.exit_code == 0, done.output
    text = site.unit.read_text()
    assert f"--config {site.file} --state-dir {site.folder / 'state'} run" in text
    assert f"Environment=PATH={site.folder / 'bin'}:/usr/bin:/bin\n" in text
    assert "@" not in text.replace("@system-service", "").replace("@privileged", "")
    assert site.calls.read_text().splitlines() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable tqd.service",
    ]
    assert "enable-linger" in done.output


def test_a_dry_run_prints_the_file_and_changes_nothing(site: Site) -> None:
    done = install(site, "--dry-run")
    assert done.stdout.startswith("# `tqd service install`")
    assert "[Install]" in done.stdout
    assert not site.unit.exists()
    assert site.calls.read_text() == ""


def test_installing_again_changes_nothing(site: Site) -> None:
    install(site)
    before = site.unit.stat()
    done = install(site)
    assert (done.exit_code, "is up to date" in done.output) == (0, True)
    assert site.unit.stat().st_ino == before.st_ino


def test_a_unit_of_an_older_version_is_brought_up_to_date(site: Site) -> None:
    install(site)
    site.file.write_text(
        "version: 1\nservers: {chat: {model: org/m, port: 8081, stop_grace: 10m}}\n"
    )
    shown = site.run("status")
    assert "a stop may take 660 s now, and 120 s are given to it" in shown.output
    assert "wrote" in install(site).output
    assert "TimeoutStopSec=660" in site.unit.read_text()
    assert "problem" not in site.run("status").output


def test_an_edited_unit_is_never_overwritten(site: Site) -> None:
    """C19: an upgrade that loses the settings of its user."""
    install(site)
    edited = site.unit.read_text().replace("LimitNOFILE=65536", "LimitNOFILE=999")
    site.unit.write_text(edited)

    for _ in range(2):
        done = install(site)
        assert done.exit_code == 0
        assert site.unit.read_text() == edited
        assert "LimitNOFILE=65536" in site.unit.with_name("tqd.service.new").read_text()
        assert "-LimitNOFILE=999\n+LimitNOFILE=65536\n" in done.output
    assert "(edited by hand)" in site.run("status").output

    removed = site.run("uninstall")
    assert removed.exit_code == 0
    assert site.unit.with_name("tqd.service.saved").read_text() == edited


def test_uninstall_stops_the_service_and_removes_its_file_once(site: Site) -> None:
    install(site)
    site.calls.write_text("")
    assert site.run("uninstall").exit_code == 0
    assert not site.unit.exists()
    assert site.calls.read_text().splitlines() == [
        "systemctl --user disable --now tqd.service",
        "systemctl --user daemon-reload",
    ]
    again = site.run("uninstall")
    assert (again.exit_code, "not installed" in again.output) == (0, True)


def test_a_service_that_cannot_be_stopped_keeps_its_file(site: Site) -> None:
    install(site)
    site.program("systemctl", "*disable*) echo 'Access denied' >&2; exit 4;;")
    refused = site.run("uninstall")
    assert (refused.exit_code, "Access denied" in refused.stderr) == (1, True)
    assert site.unit.exists()


def test_the_daemon_of_another_state_folder_is_not_pushed_aside(site: Site) -> None:
    install(site)
    refused = install(site, state="other")
    assert refused.exit_code == 1
    assert f"runs the daemon of {site.folder / 'state'}" in refused.stderr


def test_a_broken_configuration_is_refused_before_anything_is_written(site: Site) -> None:
    site.file.write_text("version: 1\nservers: {chat: {modle: x}}\n")
    refused = install(site)
    assert (refused.exit_code, "servers.chat.modle" in refused.stderr) == (2, True)
    assert not site.unit.exists()


def test_a_key_of_this_shell_that_the_service_will_not_have_is_said(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.file.write_text(
        "version: 1\nservers: {chat: {model: org/m, port: 8081, api_key: '${env:CHAT_KEY}'}}\n"
    )
    monkeypatch.setenv("CHAT_KEY", "sk-secret")
    done = install(site)
    assert done.exit_code == 0
    assert "CHAT_KEY" in done.stderr
    assert "api_key: {file: path}" in done.stderr
    assert "sk-secret" not in done.output + site.unit.read_text()


def test_a_service_of_the_machine_needs_an_account(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUDO_USER", raising=False)
    assert "--run-as USER names one" in install(site, "--system").stderr
    assert (
        'no account "nobody-at-all"'
        in install(site, "--system", "--run-as", "nobody-at-all").stderr
    )
    assert "your own services run as you" in install(site, "--run-as", "root").stderr
    monkeypatch.setenv("SUDO_USER", "nobody")
    done = install(site, "--system")
    assert done.exit_code == 0, done.output
    text = (site.folder / "units" / "tqd.service").read_text()
    assert "User=nobody\n" in text
    assert "systemctl enable tqd.service" in site.calls.read_text()


def test_a_file_that_may_not_be_written_is_refused_with_what_to_do(site: Site) -> None:
    site.unit.parent.parent.mkdir(parents=True)
    site.unit.parent.touch()
    refused = install(site)
    assert refused.exit_code == 1
    assert f"{site.unit} cannot be" in refused.stderr


def test_status_says_what_keeps_it_from_running_and_exits_with_3(site: Site) -> None:
    assert site.run("status").exit_code == 3
    install(site)
    site.unit.write_text(site.unit.read_text().replace("ExecStart=", "ExecStart=/gone", 1))
    shown = site.run("status")
    assert shown.exit_code == 3
    assert "enabled  yes" in shown.output
    assert "running  no (inactive)" in shown.output
    assert "its interpreter is gone: /gone" in shown.output


def test_launchd_gets_its_property_list(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "daemon.cli.hosts.host",
        lambda scope: Launchd(scope, site.folder, 501, system_daemons=site.folder / "daemons"),
    )
    assert install(site).exit_code == 0
    path = site.folder / "Library/LaunchAgents/org.tqd.daemon.plist"
    job = plistlib.loads(path.read_bytes())
    assert job["ProgramArguments"][4:] == [
        *("--config", str(site.file), "--state-dir", str(site.folder / "state")),
        *("run", "--service", "launchd"),
    ]
    assert job["ExitTimeOut"] == 120
    assert "launchctl enable gui/501/org.tqd.daemon" in site.calls.read_text()
    assert oct(path.stat().st_mode & 0o777) == "0o644"
    assert list(path.parent.iterdir()) == [path]
