"""The shipped templates, filled in as an installation does it."""

from __future__ import annotations

import configparser
import plistlib
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.config.spec import ServerSpec
from daemon.errors import TqdError
from daemon.service import unit
from daemon.service.unit import (
    Paths,
    Scope,
    launchd_plist,
    read_launchd,
    read_systemd,
    systemd_unit,
)

SCOPES = pytest.mark.parametrize("scope", list(Scope))
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)

# The exposure that systemd-analyze may find, of 100. A user's service manager cannot drop capabilities or mount
# anything without namespaces of its own, where most of the rest comes from.
EXPOSURE = {Scope.SYSTEM: 20, Scope.USER: 78}


def sections(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign] # systemd's keys are case-sensitive
    parser.read_string(text)
    return parser


def plist(paths: Paths, scope: Scope) -> dict[str, Any]:
    loaded: dict[str, Any] = plistlib.loads(launchd_plist(paths, scope).encode())
    return loaded


@SCOPES
def test_plist_keys_have_the_types_launchd_expects(paths: Paths, scope: Scope) -> None:
    """Plistlib accepts a boolean for an integer; launchd does not."""
    types = {
        "Label": str, "ProgramArguments": list, "WorkingDirectory": str, "EnvironmentVariables": dict, "RunAtLoad": bool,
        "KeepAlive": dict, "ThrottleInterval": int, "ExitTimeOut": int, "ProcessType": str,
        "SoftResourceLimits": dict, "HardResourceLimits": dict, "Umask": int, "StandardErrorPath": str,
    }  # fmt: skip
    types |= {"UserName": str} if scope is Scope.SYSTEM else {"LimitLoadToSessionType": list}

    assert {key: type(value) for key, value in plist(paths, scope).items()} == types


@SCOPES
def test_plist_gives_up_when_the_daemon_says_so_and_never_throttles_it(
    paths: Paths, scope: Scope
) -> None:
    found = plist(paths, scope)
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["ThrottleInterval"] >= 30
    assert found["ProcessType"] == "Interactive"
    assert found["Umask"] == 0o077
    assert found["ExitTimeOut"] == 120
    assert found["ProgramArguments"][-2:] == ["--service", "launchd"]
    if scope is Scope.USER:
        assert found["LimitLoadToSessionType"] == ["Aqua", "Background"]


@SCOPES
def test_plist_label_is_its_file_name_and_keys_are_unique(paths: Paths, scope: Scope) -> None:
    assert plist(paths, scope)["Label"] == "org.tqd.daemon"
    for element in ElementTree.fromstring(launchd_plist(paths, scope)).iter("dict"):
        keys = [key.text for key in element.findall("key")]
        assert len(keys) == len(set(keys))


@SCOPES
def test_plist_holds_odd_paths_exactly(odd_paths: Paths, scope: Scope) -> None:
    found = plist(odd_paths, scope)
    assert found["ProgramArguments"][0] == odd_paths.python
    assert found["EnvironmentVariables"] == odd_paths.environment
    assert found["StandardErrorPath"] == str(odd_paths.state / "logs" / "launchd.log")
    runs = read_launchd(launchd_plist(odd_paths, scope))
    assert runs == unit.Installed(Path(odd_paths.python), odd_paths.config, odd_paths.state, 120)


@SCOPES
def test_unit_tells_systemd_when_starting_again_cannot_help(paths: Paths, scope: Scope) -> None:
    found = sections(systemd_unit(paths, scope))
    service = found["Service"]
    assert service["Type"] == "notify"
    assert service["RestartPreventExitStatus"] == "78"
    assert service["ExecStart"].endswith("run --service systemd")
    assert service["ExecReload"].endswith("reload")
    assert service["KillMode"] == "mixed"
    assert service["TimeoutStopSec"] == "120"
    assert int(service["WatchdogSec"]) > 0
    assert {"StartLimitIntervalSec", "StartLimitBurst"} <= set(found["Unit"])
    assert ("User" in service) == (scope is Scope.SYSTEM)


@SCOPES
def test_unit_is_read_back_as_it_was_meant(odd_paths: Paths, scope: Scope) -> None:
    runs = read_systemd(systemd_unit(odd_paths, scope))
    assert runs == unit.Installed(Path(odd_paths.python), odd_paths.config, odd_paths.state, 120)


@pytest.mark.parametrize("text", ["", "ExecStart='", "[Service]\nExecStart=/bin/true\n"])
def test_a_unit_of_somebody_else_is_read_without_complaint(text: str) -> None:
    assert read_systemd(text).state is None


@pytest.mark.parametrize(
    "text", ["", "<plist", "<plist><array/></plist>", "<plist><dict/></plist>", "bplist00"]
)
def test_a_property_list_of_somebody_else_is_read_without_complaint(text: str) -> None:
    assert read_launchd(text) == unit.Installed()


def test_paths_that_no_unit_can_hold_are_refused(paths: Paths) -> None:
    broken = replace(paths, home=Path("/home/a\nb"))
    with pytest.raises(TqdError, match="control characters"):
        systemd_unit(broken, Scope.USER)


@needs_systemd
@SCOPES
@pytest.mark.parametrize("odd", [False, True])
def test_unit_passes_systemd_analyze(
    tmp_path: Path, paths: Paths, odd_paths: Paths, scope: Scope, odd: bool
) -> None:
    """Unknown keys and bad values only show on stderr: it must be empty."""
    given = odd_paths if odd else paths
    python = tmp_path / ("a b%" if odd else "plain") / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/true")
    path = tmp_path / "tqd.service"
    path.write_text(systemd_unit(replace(given, python=str(python), user="root"), scope))

    done = subprocess.run(
        ["systemd-analyze", f"--{scope}", "verify", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )

    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@SCOPES
def test_unit_exposes_no_more_than_it_must(tmp_path: Path, paths: Paths, scope: Scope) -> None:
    path = tmp_path / "tqd.service"
    path.write_text(systemd_unit(paths, scope))
    done = subprocess.run(
        [
            *("systemd-analyze", "security", "--offline=true", "--no-pager"),
            *(f"--threshold={EXPOSURE[scope]}", str(path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_a_stop_is_given_more_than_its_longest_server_takes() -> None:
    defaults = ServerSpec(model="m", port=1)
    usual = defaults.drain_timeout + defaults.stop_grace
    assert unit.stop_s({}) > usual
    slow = ServerSpec(model="m", port=2, drain_timeout=600.0, stop_grace=120.0)
    assert unit.stop_s({"a": defaults, "b": slow}) > 720


@SCOPES
@pytest.mark.parametrize("render", [systemd_unit, launchd_plist])
def test_an_edit_is_told_from_an_older_version(paths: Paths, scope: Scope, render: Any) -> None:
    written = render(paths, scope)
    older = render(replace(paths, stop_s=99), scope)
    assert unit.decide(None, written) == "new"
    assert unit.decide(written, written) == "current"
    assert unit.decide(older, written) == "outdated"
    for edited in (
        older.replace("65536", "1024"),
        older + "# mine\n",
        "# mine\n" + older,
        older.rsplit("\n", 2)[0],
        "",
    ):
        assert unit.decide(edited, written) == "edited"
