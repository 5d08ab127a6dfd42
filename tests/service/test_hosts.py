"""systemd and launchd, played by small programs on the PATH that write down what they are asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.errors import TqdError
from daemon.service.host import Condition
from daemon.service.launchd import Launchd
from daemon.service.systemd import Systemd
from daemon.service.unit import Scope

FakeProgram = Callable[[str, str], Path]
JOB = "gui/501/org.tqd.daemon"


def systemd(tmp_path: Path, scope: Scope = Scope.USER) -> Systemd:
    return Systemd(scope, tmp_path / "config", system_units=tmp_path / "units")


def launchd(tmp_path: Path, scope: Scope = Scope.USER) -> Launchd:
    return Launchd(
        scope, tmp_path, 501, system_daemons=tmp_path / "daemons", pause=lambda seconds: None
    )


def asked(calls: Path) -> list[str]:
    return calls.read_text().splitlines()


def test_systemd_is_asked_for_the_users_unit_and_for_the_machines(
    tmp_path: Path, fake_program: FakeProgram
) -> None:
    calls = fake_program("systemctl", "*) exit 0;;")
    for scope, flag in ((Scope.USER, "--user "), (Scope.SYSTEM, "")):
        calls.write_text("")
        host = systemd(tmp_path, scope)
        host.install()
        host.start()
        host.remove(10)
        host.forget()
        assert asked(calls) == [
            f"{flag}{words}"
            for words in (
                "daemon-reload",
                "enable tqd.service",
                "reset-failed tqd.service",
                "start tqd.service",
                "disable --now tqd.service",
                "daemon-reload",
            )
        ]
    assert systemd(tmp_path).path == tmp_path / "config/systemd/user/tqd.service"
    assert systemd(tmp_path, Scope.SYSTEM).path == tmp_path / "units/tqd.service"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "ActiveState=active\nSubState=running\nUnitFileState=enabled\nMainPID=42\nResult=success",
            Condition(True, True, 42, "active (running)"),
        ),
        (
            "ActiveState=failed\nSubState=failed\nUnitFileState=enabled\nMainPID=0\nResult=exit-code",
            Condition(True, False, None, "failed, exit-code"),
        ),
        (
            "ActiveState=activating\nSubState=auto-restart\nUnitFileState=disabled\nMainPID=0\nResult=watchdog",
            Condition(False, False, None, "activating (auto-restart), watchdog"),
        ),
    ],
)
def test_what_systemd_says_of_the_unit_is_understood(
    tmp_path: Path, fake_program: FakeProgram, said: str, expected: Condition
) -> None:
    fake_program("systemctl", f"*) printf '{said}\\n'".replace("\n", "\\n") + ";;")
    assert systemd(tmp_path).condition() == expected


def test_systemds_refusal_is_passed_on_with_what_to_do(
    tmp_path: Path, fake_program: FakeProgram
) -> None:
    fake_program("systemctl", "*) echo 'Failed to connect to bus: No medium found' >&2; exit 1;;")
    with pytest.raises(TqdError, match="daemon-reload") as caught:
        systemd(tmp_path).install()
    assert "No medium found" in caught.value.message
    assert "--system` needs no login" in (caught.value.hint or "")


def test_a_machine_without_the_program_is_told_how_to_go_on(
    tmp_path: Path, fake_program: FakeProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(TqdError, match="systemctl cannot be run") as caught:
        systemd(tmp_path).start()
    assert "`tqd start`" in (caught.value.hint or "")


def test_launchd_loads_the_agent_into_the_desktops_domain(
    tmp_path: Path, fake_program: FakeProgram
) -> None:
    calls = fake_program("launchctl", "*) exit 0;;")
    host = launchd(tmp_path)
    host.install()
    host.start()
    host.remove(10)
    assert [call for call in asked(calls) if not call.startswith("print")] == [
        f"enable {JOB}",
        f"bootstrap gui/501 {tmp_path}/Library/LaunchAgents/org.tqd.daemon.plist",
        f"bootout {JOB}",
    ]


def test_launchd_without_a_desktop_uses_the_users_domain_and_the_machines_has_its_own(
    tmp_path: Path, fake_program: FakeProgram
) -> None:
    calls = fake_program("launchctl", "'print gui/501') exit 125;; *) exit 0;;")
    launchd(tmp_path).start()
    launchd(tmp_path, Scope.SYSTEM).start()
    assert [call for call in asked(calls) if call.startswith("bootstrap")] == [
        f"bootstrap user/501 {tmp_path}/Library/LaunchAgents/org.tqd.daemon.plist",
        f"bootstrap system {tmp_path}/daemons/org.tqd.daemon.plist",
    ]


def test_launchd_recovers_from_bootstrap_failed_5(
    tmp_path: Path, fake_program: FakeProgram
) -> None:
    """The job is loaded already, and the old one is not gone at once: boot it out, and try again."""
    loaded = tmp_path / "loaded"
    loaded.write_text("xx")
    calls = fake_program(
        "launchctl",
        f"""bootstrap*)
            if [ -s {loaded} ]; then
                echo 'Bootstrap failed: 5: Input/output error' >&2; truncate -s -1 {loaded}; exit 5
            fi;;
        *) exit 0;;""",
    )
    launchd(tmp_path).start()
    verbs = [call.split()[0] for call in asked(calls)]
    assert verbs == ["print", "bootstrap", "bootout", "bootstrap", "bootstrap"]


def test_launchd_gives_up_on_a_job_that_never_loads_and_never_kills_one(
    tmp_path: Path, fake_program: FakeProgram
) -> None:
    calls = fake_program("launchctl", "bootstrap*) echo 'Bootstrap failed: 5' >&2; exit 5;;")
    with pytest.raises(TqdError, match="Bootstrap failed: 5"):
        launchd(tmp_path).start()
    assert "kickstart" not in calls.read_text()
    assert calls.read_text().count("bootstrap") < 20


@pytest.mark.parametrize(
    ("job", "disabled", "expected"),
    [
        ("\tstate = running\n\tpid = 77\n", "", Condition(True, True, 77, "running")),
        (
            "\tstate = not running\n\tlast exit code = 78: EX_CONFIG\n",
            '"org.tqd.daemon" => disabled',
            Condition(False, False, None, "not running, last exit code 78: EX_CONFIG"),
        ),
        (None, "", Condition(True, False, None, "not loaded")),
    ],
)
def test_what_launchd_says_of_the_job_is_understood(
    tmp_path: Path,
    fake_program: FakeProgram,
    job: str | None,
    disabled: str,
    expected: Condition,
) -> None:
    (tmp_path / "job").write_text(job or "")
    (tmp_path / "disabled").write_text(disabled)
    fake_program(
        "launchctl",
        f"'print {JOB}') cat {tmp_path}/job; exit {0 if job else 113};;"
        f" print-disabled*) cat {tmp_path}/disabled;; *) exit 0;;",
    )
    assert launchd(tmp_path).condition() == expected
