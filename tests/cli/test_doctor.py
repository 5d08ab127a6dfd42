from __future__ import annotations

import io
import json
import os
import socket
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli import machine_findings, site_findings
from daemon.cli.findings import Finding, Scene
from daemon.cli.main import main
from daemon.config.context import MlxContext
from daemon.config.load import load
from daemon.paths import StateDir
from daemon.service.systemd import Systemd
from daemon.service.unit import Scope
from daemon.supervisor.last_good import LastGood
from tests.free_ports import free_port

MakeModel = Callable[..., Path]
Doctor = Callable[..., Result]

CONTEXT = MlxContext(
    device="cpu", device_name="a cpu", memory_bytes=None, multiply_ms=0.1, correct=True,
    versions={"mlx": "1"}, python="3.11", executable="/p",
)  # fmt: skip


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run the command on a machine without services; MLX itself is tried in one test only."""

    def no_process(scene: Scene) -> Iterator[Finding]:
        yield machine_findings.judge_mlx(CONTEXT, has_gpu=False)

    def host(scope: Scope) -> Systemd:
        return Systemd(scope, tmp_path / "none", system_units=tmp_path / "none")

    monkeypatch.setattr(machine_findings, "_mlx", no_process)
    monkeypatch.setattr("daemon.cli.hosts.host", host)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    place = ("-c", str(tmp_path / "servers.yaml"), "--state-dir", str(tmp_path / "state"))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*place, "doctor", *arguments])

    return run


def write(folder: Path, *servers: str) -> None:
    lines = "".join(f"  {it}\n" for it in servers)
    (folder / "servers.yaml").write_text(f"version: 1\ndaemon: {{status: null}}\nservers:\n{lines}")


def verdicts(done: Result) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for it in json.loads(done.stdout)["findings"]:
        found.setdefault(it["topic"], []).append(f"{it['verdict']}: {it['text']}")
    return found


def test_a_healthy_machine_has_no_problem(
    doctor: Doctor, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    write(tmp_path, f"chat: {{model: ./m, port: {free_port()}}}")
    done = doctor("--json")
    assert done.exit_code == 0, done.stdout
    found = verdicts(done)
    assert {"versions", "mlx", "memory", "config", "ports", "state", "disk", "files", "daemon"} <= (
        found.keys()
    )
    assert found["state"] == [f"ok: {tmp_path / 'state'} is not there yet, and can be made"]
    assert found["daemon"] == ["ok: not running"]
    shown = doctor()
    assert shown.exit_code == 0
    assert "hint: `tqd start` starts it" in shown.stdout


def test_what_keeps_a_server_from_running_is_a_problem_with_a_remedy(
    doctor: Doctor, make_model: MakeModel, state: StateDir, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    state.root.mkdir(mode=0o777)
    state.root.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        write(
            tmp_path,
            f"chat: {{model: ./m, port: {port}}}",
            f"gone: {{model: org/gone, port: {free_port()}}}",
        )
        done = doctor("--json")
    assert done.exit_code == 1
    found = verdicts(done)
    assert f"problem: chat: port {port} is in use by pid {os.getpid()}" in found["ports"][0]
    assert "problem: " in found["state"][0]
    assert any(it.startswith("warn: gone (org/gone): ") for it in found["config"])
    shown = doctor().stdout
    assert f"hint: chmod go-w {state.root}" in shown
    assert "`tqd pull` fetches it" in shown


def test_a_broken_configuration_is_a_problem_at_its_place(doctor: Doctor, tmp_path: Path) -> None:
    write(tmp_path, "chat: {modle: x, port: 1}")
    done = doctor("--json")
    assert done.exit_code == 1
    assert any("servers.yaml:4:10: servers.chat.modle" in it for it in verdicts(done)["config"])


def test_a_key_that_others_can_read_is_said(
    doctor: Doctor, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    (tmp_path / "key").write_text("sk-1234567890abcdef\n")
    (tmp_path / "key").chmod(0o644)
    write(
        tmp_path,
        f"a: {{model: ./m, port: {free_port()}, api_key: {{file: ./key}}}}",
        f"b: {{model: ./m, port: {free_port()}, api_key: plain-key}}",
    )
    (tmp_path / "servers.yaml").chmod(0o644)
    warned = [it for it in verdicts(doctor("--json"))["config"] if "API key" in it]
    assert [str(tmp_path / "key") in warned[0], "servers.yaml" in warned[1]] == [True, True]
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "servers.yaml").chmod(0o600)
    assert not any("API key" in it for it in verdicts(doctor("--json"))["config"])


def test_mlx_is_judged_by_what_it_computes_and_where() -> None:
    judge = machine_findings.judge_mlx
    assert judge(CONTEXT, has_gpu=False).verdict == "ok"
    on_cpu = judge(CONTEXT, has_gpu=True)
    assert (on_cpu.verdict, "tqd[cuda13]" in (on_cpu.hint or "")) == ("warn", True)
    wrong = judge(CONTEXT.model_copy(update={"correct": False}), has_gpu=False)
    assert wrong.verdict == "problem"


def test_mlx_is_tried_in_a_process_of_its_own_and_one_that_dies_is_a_problem(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    for script, word in (
        ("kill -ABRT $$", "signal 6"),
        ("echo 'ImportError: no libmlx' >&2; exit 1", "ended with code 1: ImportError: no libmlx"),
        ("echo not json", "code 0"),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        found = machine_findings._try_mlx(str(python))
        assert (found.verdict, word in found.text) == ("problem", True)
    assert machine_findings._try_mlx(str(tmp_path / "none")).verdict == "problem"


@pytest.mark.parametrize(("free", "verdict"), [(2**20, "problem"), (2**30, "warn"), (2**40, "ok")])
def test_room_on_the_disk_is_judged(free: int, verdict: str) -> None:
    assert machine_findings.judge_space("logs", Path("/x"), free).verdict == verdict


def test_packages_of_another_version_than_tqds_own_are_named() -> None:
    wanted = ["mlx==0.32.4", "mlx[cpu]==0.32.4; extra == 'cpu'", "click>=8"]
    assert machine_findings.misfits({"mlx": "0.32.4"}, wanted) == []
    assert machine_findings.misfits({"mlx": "0.31"}, wanted) == [
        "mlx 0.31, where tqd was made for 0.32.4"
    ]


@pytest.mark.parametrize(
    ("mode", "mine", "fault"),
    [
        (stat.S_IFDIR | 0o700, True, None),
        (stat.S_IFDIR | 0o755, True, None),
        (stat.S_IFDIR | 0o770, True, "can be written to by others, who could pose as the daemon"),
        (stat.S_IFDIR | 0o700, False, "belongs to somebody else"),
        (stat.S_IFREG | 0o600, True, "is no folder"),
    ],
)
def test_a_state_folder_must_be_ones_own(mode: int, mine: bool, fault: str | None) -> None:
    assert site_findings.judge_folder(mode, mine=mine)[0] == fault


SECRETS = {
    "literal": "lit-Zq81kfXw",
    "file": "fil-Pw02mvTr",
    "env reference": "ref-Uy73nbGh",
    "value of env": "val-Jk55ceSd",
    "with quotes": 'quo-"Aa\\94é-Rt',
    "bearer": "bea-Vc66lkMn",
    "shell": "she-Bn48qwEr",
    "broken file": "bro-Xd19tyUi",
    "of an earlier file": "ear-Lo27asDf",
}


@pytest.fixture
def planted(
    tmp_path: Path, state: StateDir, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site with a secret in every place that a bundle looks into."""
    make_model(tmp_path / "m")
    monkeypatch.setenv("CHAT_KEY", SECRETS["env reference"])
    monkeypatch.setenv("SOME_TOKEN", SECRETS["shell"])
    (tmp_path / "key").write_text(f"{SECRETS['file']}\n")
    write(
        tmp_path,
        f"a: {{model: ./m, port: {free_port()}, api_key: {SECRETS['literal']}}}",
        f"b: {{model: ./m, port: {free_port()}, api_key: {{file: ./key}}}}",
        f"c: {{model: ./m, port: {free_port()}, api_key: '${{env:CHAT_KEY}}'}}",
        f"d: {{model: ./m, port: {free_port()}, env: {{PASS: {SECRETS['value of env']},"
        f" ODD: {json.dumps(SECRETS['with quotes'])}}}}}",
    )
    log = state.server_log("a")
    log.parent.mkdir(parents=True)
    leaks = [it for name, it in SECRETS.items() if name != "bearer"]
    log.write_text(
        "--- launch 1 pid 7 spec ab at 2026-01-31T08:00:00Z ---\nold launch\n"
        "--- launch 2 pid 8 spec ab at 2026-01-31T09:00:00Z ---\n"
        f"Authorization: Bearer {SECRETS['bearer']}\n"
        + "".join(f"oops {it}\n" + json.dumps({"event": it}) + "\n" for it in leaks)
    )
    state.daemon_log.write_text(f"started with {SECRETS['shell']}\n")
    state.workers.write_text(json.dumps([{"name": "a", "pid": 7, "nonce": "n0nce-of-a-worker"}]))
    state.desired.write_text(json.dumps({"a": "stopped"}))


def opened(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            it.name.removeprefix("tqd-doctor/"): _read(archive, it) for it in archive.getmembers()
        }


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = archive.extractfile(member)
    assert isinstance(file, io.BufferedReader)
    return file.read().decode()


@pytest.mark.usefixtures("planted")
def test_no_secret_is_in_any_byte_of_the_bundle(
    doctor: Doctor, state: StateDir, tmp_path: Path
) -> None:
    """Those of the configuration that was accepted last, and of a broken one that replaces it, included."""
    bundle = tmp_path / "bundle.tar.gz"
    config = tmp_path / "servers.yaml"
    now = config.read_text()
    config.write_text(now.replace(SECRETS["literal"], SECRETS["of an earlier file"]))
    loaded = load(config)
    environ = {"CHAT_KEY": SECRETS["env reference"]}
    assert LastGood(state.last_good, environ).save(config, loaded.files, loaded.content_hash)

    for text in (now, now + f"  e: {{api_key}}\n  api_key: {SECRETS['broken file']}\n"):
        config.write_text(text)
        doctor("--bundle", str(bundle))
        held = opened(bundle)
        everything = "\n".join([*held, *held.values()])
        for name, secret in SECRETS.items():
            unknown_yet = name == "broken file" and text == now
            for spelled in (secret, json.dumps(secret)[1:-1]):
                assert unknown_yet or spelled not in everything, name
        assert "n0nce" not in everything
        assert bundle.stat().st_mode & 0o777 == 0o600
        bundle.unlink()


@pytest.mark.usefixtures("planted")
def test_a_bundle_holds_what_help_needs(doctor: Doctor, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    done = doctor("--bundle", str(path))
    assert f"wrote {path}" in done.stderr
    held = opened(path)
    assert {
        "findings.json", "versions.json", "environment.json", "config.json", "status.json", "memory.json",
        "state.json", "logs/a.log", "logs/daemon.log",
    } == set(held)  # fmt: skip
    assert "old launch" not in held["logs/a.log"]
    assert held["logs/a.log"].startswith("--- launch 2 ")
    config = json.loads(held["config.json"])["servers"]
    assert config["a"]["values"]["api_key"] == "«hidden»"
    assert config["a"]["values"]["kv.policy"] == "balanced"
    assert config["d"]["places"]["env.PASS"].startswith(str(tmp_path / "servers.yaml"))
    assert "SOME_TOKEN" in json.loads(held["environment.json"])
    state = json.loads(held["state.json"])
    assert state["desired"] == {"a": "stopped"}
    assert state["files"]["workers.json"]["bytes"] > 0

    again = doctor("--bundle", str(path))
    assert (again.exit_code, f"{path} exists" in again.stderr) == (1, True)


def test_version_names_tqd_first_and_what_it_builds_on() -> None:
    lines = CliRunner().invoke(main, ["version"]).stdout.splitlines()
    assert lines[0].startswith("tqd ")
    assert any(line.startswith("mlx ") for line in lines)
    assert json.loads(CliRunner().invoke(main, ["version", "--json"]).stdout)["tqd"] in lines[0]


def kernel_report(*, failed: bool) -> dict[str, object]:
    reason = "the metal kernels disagree with the reference on this device (by 3.00%)"
    return {
        "device": "a gpu",
        "mlx": "1",
        "agreements": [
            {"case": "turbo8v4, one", "backend": "metal", "reason": None, "failed": False},
            {"case": "affine8, two", "backend": "reference", "reason": "no kernel for affine8", "failed": False},
            {"case": "turbo4v4, three", "backend": "reference" if failed else "metal", "reason": reason if failed else None, "failed": failed},
        ],
        "packing": [{"case": "packing turbo4v4", "backend": "metal", "reason": None, "failed": False}],
        "timings": [
            {"scheme": "turbo8v4", "tokens": 2048, "packed_us": 10.0, "plain_us": 25.0, "ratio": 2.5}
        ],
    }  # fmt: skip


@pytest.mark.parametrize("failed", [False, True])
def test_bench_says_which_kernels_agree_and_how_fast_they_are(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    asked: list[object] = []

    def measure(task: list[str], *_: object, **__: object) -> dict[str, object]:
        asked.append(task)
        return kernel_report(failed=failed)

    monkeypatch.setattr("daemon.cli.doctor.measure", measure)
    result = doctor("--bench")

    assert asked == [["kernels"]]
    assert ("failed: turbo4v4, three" in result.stdout) == failed
    assert "no kernel for affine8" in result.stdout
    said = " ".join(result.stdout.split())
    assert f"attend in {1 if failed else 2} of 3 cases and pack 1 of 1 layouts" in said
    assert "2.50" in result.stdout
    document = json.loads(doctor("--bench", "--json").stdout)
    assert document["kernels"] == kernel_report(failed=failed)
    assert not (failed and document["ok"])
