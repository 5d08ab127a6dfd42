from __future__ import annotations

import configparser
import plistlib
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from daemon.config.spec import ServerSpec
from daemon.resources import shipped

PLIST = shipped("launchd") / "org.tqd.daemon.plist"
UNIT = shipped("systemd") / "tqd.service"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign] # systemd's keys are case-sensitive
    parser.read_string(UNIT.read_text())
    return parser


def longest_stop_s() -> float:
    spec = ServerSpec(model="m", port=8001)
    return spec.drain_timeout + spec.stop_grace


@pytest.fixture(scope="module")
def plist() -> dict[str, Any]:
    loaded: dict[str, Any] = plistlib.loads(PLIST.read_bytes())
    return loaded


def test_plist_keys_have_the_types_launchd_expects(plist: dict[str, Any]) -> None:
    """Plistlib accepts a boolean for an integer; launchd does not."""
    types = {
        "Label": str, "ProgramArguments": list, "WorkingDirectory": str, "EnvironmentVariables": dict, "RunAtLoad": bool,
        "KeepAlive": dict, "ThrottleInterval": int, "ExitTimeOut": int, "ProcessType": str, "LimitLoadToSessionType": list,
        "SoftResourceLimits": dict, "HardResourceLimits": dict, "Umask": int, "StandardErrorPath": str,
    }  # fmt: skip

    assert {key: type(value) for key, value in plist.items()} == types


def test_plist_gives_up_when_the_daemon_says_so_and_never_throttles_it(
    plist: dict[str, Any],
) -> None:
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["ThrottleInterval"] >= 30
    assert plist["ProcessType"] == "Interactive"
    assert plist["LimitLoadToSessionType"] == ["Aqua", "Background"]
    assert plist["Umask"] == 0o077
    assert plist["ExitTimeOut"] > longest_stop_s()


def test_plist_label_is_its_file_name_and_keys_are_unique(plist: dict[str, Any]) -> None:
    assert plist["Label"] == PLIST.stem
    for element in ElementTree.parse(PLIST).iter("dict"):
        keys = [key.text for key in element.findall("key")]
        assert len(keys) == len(set(keys))


def test_plist_leaves_nothing_to_a_shell(plist: dict[str, Any]) -> None:
    values = [
        *plist["ProgramArguments"],
        *plist["EnvironmentVariables"].values(),
        plist["StandardErrorPath"],
    ]

    assert not any(sign in value for value in values for sign in "~$`")


def test_unit_tells_systemd_when_starting_again_cannot_help() -> None:
    service = unit()["Service"]

    assert service["Type"] == "notify"
    assert service["RestartPreventExitStatus"] == "78"
    assert service["ExecStart"].endswith("run --service systemd")
    assert float(service["TimeoutStopSec"]) > longest_stop_s()


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_unit_passes_systemd_analyze(tmp_path: Path) -> None:
    """Unknown keys and bad values only show on stderr: it must be empty."""
    path = tmp_path / "tqd.service"
    path.write_text(UNIT.read_text().replace("@TQD@", "/bin/true"))

    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )

    assert (done.returncode, done.stderr) == (0, "")
