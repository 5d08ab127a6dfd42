"""What a daemon leaves on disk for the next one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from daemon.config.load import load
from daemon.config.spec import ServerSpec
from daemon.paths import StateDir
from daemon.supervisor import leftovers
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.files import make_private, write_private
from daemon.supervisor.instance import AlreadyRunningError, Instance, holder
from daemon.supervisor.last_good import LastGood
from daemon.supervisor.leftovers import Identity, Register, see_out
from daemon.supervisor.server import Desired

ON = ServerSpec(model="m", port=1)
OFF = ServerSpec(model="m", port=1, enabled=False)
BY_HAND = ServerSpec(model="m", port=1, autostart=False)


def test_a_private_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "file"
    write_private(path, b"one")
    write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert [it.name for it in path.parent.iterdir()] == ["file"]
    modes = [oct(it.stat().st_mode & 0o777) for it in (path, path.parent, path.parent.parent)]
    assert modes == ["0o600", "0o700", "0o700"]


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private(tmp_path)
    assert oct(tmp_path.stat().st_mode & 0o777) == "0o755"


def test_the_users_word_outlives_the_daemon_and_wins_over_autostart(tmp_path: Path) -> None:
    first = DesiredState(tmp_path / "desired.json")
    first.say(["a"], Desired.STOPPED)
    first.say(["b"], Desired.RUNNING)

    second = DesiredState(tmp_path / "desired.json")
    assert (second.of("a", ON), second.source("a")) == (Desired.STOPPED, "cli")
    assert second.of("b", BY_HAND) is Desired.RUNNING
    assert second.of("b", OFF) is Desired.STOPPED


def test_without_a_word_the_file_decides(tmp_path: Path) -> None:
    desired = DesiredState(tmp_path / "desired.json")
    assert (desired.of("a", ON), desired.source("a")) == (Desired.RUNNING, "config")
    assert desired.of("a", BY_HAND) is Desired.STOPPED


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": "dancing", "b": "stopped"}'])
def test_a_damaged_file_of_wishes_does_not_keep_the_daemon_from_starting(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "desired.json").write_text(content)
    assert DesiredState(tmp_path / "desired.json").of("a", ON) is Desired.RUNNING


def test_a_word_on_a_server_that_left_the_file_is_forgotten(tmp_path: Path) -> None:
    DesiredState(tmp_path / "d").say(["a", "b"], Desired.STOPPED)
    DesiredState(tmp_path / "d").forget(["a"])
    later = DesiredState(tmp_path / "d")
    assert (later.of("a", ON), later.of("b", ON)) == (Desired.RUNNING, Desired.STOPPED)


def test_one_state_folder_has_one_daemon(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    assert holder(state) is None
    first, second = Instance(state), Instance(state)
    first.acquire()
    first.announce(tmp_path / "elsewhere.sock")
    found = holder(state)
    assert found is not None
    assert (found.pid, found.control) == (psutil.Process().pid, tmp_path / "elsewhere.sock")
    with pytest.raises(AlreadyRunningError, match=f"with pid {found.pid}"):
        second.acquire()

    first.release()
    assert holder(state) is None
    second.acquire()
    second.release()


def sleeper(*, deaf: bool = False) -> subprocess.Popen[bytes]:
    """Return a process with a group of its own that has begun to sleep."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if deaf else ""
    program = f"import signal, sys, time;{ignore}print(flush=True);time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_a_left_over_is_known_by_pid_and_start_time(tmp_path: Path) -> None:
    process = sleeper()
    Register(tmp_path / "workers.json").add("chat", process.pid, "n", 4)
    (found,) = Register(tmp_path / "workers.json").earlier()
    assert (found.name, found.pid, found.nonce) == ("chat", process.pid, "n")

    corrected = Identity("chat", process.pid, found.started + 2, "n")  # the clock was
    assert corrected.alive()
    reused = Identity("chat", process.pid, found.started - 100, "n")
    assert not reused.alive()

    process.kill()
    process.wait()
    assert Register(tmp_path / "workers.json").earlier() == []


def test_launch_numbers_outlive_the_worker_and_the_daemon(tmp_path: Path) -> None:
    register = Register(tmp_path / "workers.json")
    register.add("chat", os.getpid(), "n", 4)
    register.drop(os.getpid())
    assert Register(tmp_path / "workers.json").launched == {"chat": 4}


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '{"workers": [1, {"name": "a"}], "launches": 3}', '{"launches": {"a": "b"}}'],
)
def test_a_damaged_register_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "workers.json").write_text(content)
    register = Register(tmp_path / "workers.json")
    assert (register.earlier(), register.launched) == ([], {})


@pytest.mark.parametrize(
    ("deaf", "grace_s", "how"), [(False, 60.0, "SIGTERM"), (True, 0.3, "SIGKILL")]
)
def test_a_left_over_that_stays_is_ended_politely_first(
    monkeypatch: pytest.MonkeyPatch, deaf: bool, grace_s: float, how: str
) -> None:
    monkeypatch.setattr(leftovers, "LEASE_DRAIN_S", 0.1)
    with sleeper(deaf=deaf) as process:
        started = psutil.Process(process.pid).create_time()
        identity = Identity("chat", process.pid, started, "n")
        assert asyncio.run(see_out(identity, grace_s=grace_s)) == how


def test_a_left_over_that_goes_is_left_alone() -> None:
    with sleeper() as process:
        started = psutil.Process(process.pid).create_time()
        process.kill()
        identity = Identity("chat", process.pid, started, "n")
        assert asyncio.run(see_out(identity, grace_s=0.3)) == "by itself"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration with an include, a policy and a reference to the environment."""
    path = tmp_path / "etc" / "servers.yaml"
    (path.parent / "policies").mkdir(parents=True)
    (path.parent / "policies" / "mine.yaml").write_text(
        "description: mine\nsource: a test\nmode: int8\n"
        "bits_per_value: {64: 8.25, 128: 8.125, 256: 8.0625}\n"
    )
    path.write_text("version: 1\ninclude: [more.yaml]\n")
    (path.parent / "more.yaml").write_text(
        "servers:\n  a: {model: ./m, port: 8081, api_key: '${env:KEY}', kv: {policy: mine}}\n"
    )
    return path


def test_the_last_good_configuration_is_whole_and_holds_no_secret(
    tmp_path: Path, file: Path
) -> None:
    environ = {"KEY": "hunter2"}
    loaded = load(file, environ=environ)
    assert LastGood(tmp_path / "good", environ).save(file, loaded.files, loaded.content_hash)
    for path in file.parent.rglob("*.yaml"):
        path.write_text("broken: [")

    again = LastGood(tmp_path / "good", environ).load(file)

    assert again is not None
    assert again.servers == loaded.servers
    assert "mine" in again.policies
    kept = [it for it in (tmp_path / "good").rglob("*") if it.is_file()]
    assert all(b"hunter2" not in it.read_bytes() for it in kept)
    assert {oct(it.stat().st_mode & 0o777) for it in kept} == {"0o600"}


def test_a_newer_configuration_takes_the_place_of_the_older(tmp_path: Path, file: Path) -> None:
    good = LastGood(tmp_path / "good", {"KEY": "k"})
    for number in (8081, 8082):
        (file.parent / "more.yaml").write_text(f"servers: {{a: {{model: ./m, port: {number}}}}}\n")
        loaded = load(file, environ={"KEY": "k"})
        assert good.save(file, loaded.files, loaded.content_hash)
    again = good.load(file)
    assert again is not None
    assert again.servers.servers["a"].port == 8082
    assert len([it for it in (tmp_path / "good").iterdir() if it.is_dir()]) == 1


def test_files_that_change_while_they_are_copied_are_not_kept(tmp_path: Path, file: Path) -> None:
    good = LastGood(tmp_path / "good", {"KEY": "k"})
    first = load(file, environ={"KEY": "k"})
    assert good.save(file, first.files, first.content_hash)
    file.with_name("more.yaml").write_text("servers: {}\n")

    assert not good.save(file, first.files, "another hash")

    again = good.load(file)
    assert again is not None
    assert "a" in again.servers.servers


def test_there_is_no_last_good_of_another_file(tmp_path: Path, file: Path) -> None:
    good = LastGood(tmp_path / "good", {"KEY": "k"})
    assert good.load(file) is None
    loaded = load(file, environ={"KEY": "k"})
    good.save(file, loaded.files, loaded.content_hash)
    assert good.load(tmp_path / "other.yaml") is None
