"""Crashes, signals and kills, of workers and of the daemon itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Site


def test_a_crash_loop_ends_failed_with_code_and_last_lines_until_an_edit(site: Site) -> None:
    port = site.add("a", stub="crash-at-load")
    site.write()
    site.run()

    failed = site.is_in("a", "failed")
    assert failed["restarts"]["total"] == 2
    assert failed["reason"] == "failed 3 times within 60 s; the last time: exited with 1"
    assert failed["last_exit"]["code"] == 1
    assert failed["last_exit"]["tail"][-2:] == ["about to fail", "RuntimeError: no such tensor"]
    assert site.is_free(port)
    shown = site.tqd("status", "a")
    assert (shown.exit_code, "RuntimeError: no such tensor" in shown.stdout) == (3, True)

    del site.servers["a"]["env"]["STUB"]
    site.write()
    site.ready()
    assert site.server("a")["restarts"]["consecutive_failures"] == 0


def test_start_tells_why_a_server_failed_and_exits_with_1(site: Site) -> None:
    site.add("a", stub="exit-78")
    site.write()
    start = site.shell("start", "a")
    assert start.returncode == 1
    assert "a is failed: said why" in start.stderr
    assert "hint: do this" in start.stderr


def test_the_supervisor_answers_503_while_a_server_backs_off(site: Site) -> None:
    slow = {"max": 2, "window": "60s", "backoff": ["10m", "10m"], "stable_after": "30s"}
    port = site.add("a", stub="crash-at-load", restart=slow)
    site.write()
    site.run()
    site.is_in("a", "backoff")

    status, body, headers = site.get(port)
    assert status == 503
    assert headers["Retry-After"] == "30"  # as long as clients put up with
    assert body["error"]["message"].startswith("server a is backoff: exited with 1; next attempt")
    assert not site.is_free(port)

    assert site.tqd("stop", "a").exit_code == 0
    assert site.is_free(port)


def test_a_worker_killed_from_outside_is_replaced_and_recorded(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    pid = site.ready()["a"]
    os.kill(pid, signal.SIGKILL)
    site.until(lambda: site.server("a")["launch"] == 2, "another worker")
    site.ready()
    assert site.server("a")["last_exit"]["classified"] == "killed_external"


def test_a_deaf_worker_is_gone_and_its_port_free_when_stop_returns(site: Site) -> None:
    port = site.add("a", stub="deaf", drain_timeout="300ms", stop_grace="3s")
    site.write()
    site.run()
    pid = site.ready()["a"]

    early = site.tqd("stop", "a", "--timeout", "100ms")
    assert early.exit_code == 5
    assert "a is " in early.stderr
    assert psutil.pid_exists(pid)

    assert site.tqd("stop", "a").exit_code == 0
    assert not psutil.pid_exists(pid)
    assert site.is_free(port)
    assert site.server("a")["last_exit"]["classified"] == "killed_after_grace"


@pytest.mark.parametrize(
    ("stub", "probe", "code"),
    [
        ("hang-at-load", {"load_stall": "500ms"}, "load_stalled"),
        ("stall", {"interval": "100ms", "stall": "500ms"}, "stalled"),
    ],
)
def test_a_worker_that_stops_moving_is_replaced(
    site: Site, stub: str, probe: dict[str, str], code: str
) -> None:
    site.add("a", stub=stub, probe=probe)
    site.write()
    site.run()
    assert site.is_in("a", "failed")["reason_code"] == code
    assert site.workers() == {}


def test_a_worker_that_cannot_prove_its_launch_is_never_ready(site: Site) -> None:
    site.add("a", stub="wrong-nonce")
    site.write()
    site.run()
    assert site.is_in("a", "failed")["reason_code"] == "protocol"


class Impostor(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_stranger_that_answers_200_on_the_port_is_not_taken_for_the_worker(site: Site) -> None:
    port = site.add("a")
    site.add("b")
    site.write()
    with HTTPServer(("127.0.0.1", port), Impostor) as impostor:
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        site.run()
        blocked = site.is_in("a", "blocked")
        assert blocked["reason_code"] == "port_in_use"
        assert f"by pid {os.getpid()}" in (blocked["reason"] or "")
        site.ready("b")
        impostor.shutdown()
    site.ready()


def test_a_taken_status_port_is_said_aloud_and_the_daemon_runs_on(site: Site) -> None:
    site.add("a")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        site.status_port = stranger.getsockname()[1]
        site.write()
        site.run()
        site.ready()
        assert "no status endpoint: cannot listen on" in site.tqd("status").stdout


def test_a_killed_daemon_takes_its_workers_along_and_the_next_never_doubles_them(
    site: Site,
) -> None:
    site.add("a")
    site.add("b", env={"STUB_DRAIN_S": "1"})
    site.write()
    site.run()
    old = site.ready()

    site.signal(signal.SIGKILL)
    site.ended()
    site.run()
    seen: list[set[int]] = []
    site.until(
        lambda: seen.append(set(site.workers())) or site.server("b")["state"] == "ready", "b again"
    )
    site.ready()

    assert all(len(pids) <= 2 for pids in seen)
    assert not set(old.values()) & set(site.workers())


def test_a_worker_deaf_to_its_lease_holds_its_own_server_back_and_no_other(site: Site) -> None:
    site.add("a", stub="deaf")
    site.add("b")
    site.write()
    site.run()
    old = site.ready()

    site.signal(signal.SIGKILL)
    site.ended()
    site.run()
    site.ready("b")
    waiting = site.server("a")
    assert (waiting["state"], waiting["reason"]) == (
        "starting",
        f"waiting for pid {old['a']} of an earlier daemon to end",
    )
    os.kill(old["a"], signal.SIGKILL)
    assert site.ready("a")["a"] != old["a"]


def test_a_second_daemon_on_one_state_folder_is_refused(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    pids = site.ready()

    refusal = site.shell("run")
    assert refusal.returncode == 1
    assert f"a daemon already runs with pid {site.daemon.pid}" in refusal.stderr
    assert site.tqd("run", "--service", "launchd").exit_code == 0
    assert site.tqd("run", "--service", "systemd").exit_code == 78
    assert site.ready() == pids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything_even_while_models_load(
    site: Site, number: signal.Signals
) -> None:
    site.add("a", env={"STUB_LOAD_S": "30"})
    site.add("b")
    site.write()
    site.run()
    site.ready("b")
    site.is_in("a", "loading")

    site.signal(number)

    assert site.ended() == 0
    assert site.workers() == {}
    assert not site.state.socket.exists()


def test_a_second_signal_does_not_wait_for_running_requests(site: Site) -> None:
    site.add("a", env={"STUB_DRAIN_S": "30"}, drain_timeout="60s", stop_grace="300ms")
    site.write()
    site.run()
    site.ready()
    site.signal(signal.SIGTERM)
    site.is_in("a", "draining")
    site.signal(signal.SIGTERM)
    assert site.ended() == 0


def test_what_the_user_stopped_stays_stopped_over_a_restart_of_the_daemon(site: Site) -> None:
    site.add("a")
    site.add("b")
    site.write()
    site.run()
    site.ready()
    assert site.tqd("stop", "a").exit_code == 0
    assert site.tqd("shutdown").stdout == "the daemon has ended\n"

    site.run()
    site.ready("b")
    stopped = site.server("a")
    assert (stopped["state"], stopped["desired_source"]) == ("stopped", "cli")

    assert site.tqd("start", "--all").exit_code == 0
    site.ready()


def test_a_cold_start_with_a_broken_file_runs_the_last_good_one_and_says_so(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    site.ready()
    good = site.file.read_text()
    site.tqd("shutdown")

    site.write("version: 1\nservers: {a: {modle: x}}\n")
    site.run()
    site.ready()
    assert site.config()["state"] == "stale"
    assert "the last good configuration runs" in site.tqd("status").stdout

    site.write(good)
    site.until(lambda: site.config()["state"] == "applied", "the file is good again")


def test_a_first_start_with_a_broken_file_exits_with_2_and_says_where(site: Site) -> None:
    site.write("version: 1\nservers: {a: {modle: x}}\n")
    start = site.shell("start")
    assert start.returncode == 2
    assert "servers.yaml:2:15: servers.a.modle: unknown key" in start.stderr


def test_start_without_a_daemon_starts_one_that_outlives_the_command(site: Site) -> None:
    site.add("a")
    site.write()
    start = site.shell("start")
    assert (start.returncode, start.stdout) == (0, "started: a\n")
    site.ready()
    assert site.tqd("restart", "a").stdout == "restarted: a\n"
    assert site.server("a")["launch"] == 2
    assert site.tqd("shutdown").exit_code == 0
    assert site.tqd("shutdown").exit_code == 3
    assert site.tqd("status").exit_code == 6


def test_commands_refuse_names_they_do_not_know_and_servers_that_are_disabled(site: Site) -> None:
    site.add("a")
    site.add("off", enabled=False)
    site.write()
    site.run()
    site.ready("a")
    unknown = site.tqd("restart", "nobody")
    assert (unknown.exit_code, "one of a, off" in unknown.stderr) == (4, True)
    disabled = site.tqd("start", "off")
    assert (disabled.exit_code, "the server is disabled" in disabled.stderr) == (2, True)
    assert site.tqd("stop").exit_code == 2
    assert site.server("off")["reason"] == "disabled in servers.yaml"


def test_logs_follow_through_a_restart(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    first = site.ready()["a"]
    with subprocess.Popen(
        site.command("logs", "a", "-f"),
        env=site.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as following:
        assert following.stdout is not None
        assert following.stdout.readline().startswith(f"--- launch 1 pid {first} spec ")
        site.tqd("restart", "a")
        second = site.ready()["a"]
        for line in following.stdout:
            if line.startswith(f"--- launch 2 pid {second} spec "):
                break
        following.send_signal(signal.SIGINT)
    assert oct(site.state.server_log("a").stat().st_mode & 0o777) == "0o600"


def test_systemd_is_told_ready_status_watchdog_and_stopping_in_order(site: Site) -> None:
    site.add("a")
    site.write()
    path = site.folder / "notify"
    said: list[str] = []

    def listen() -> None:
        # all the time, as systemd does: what finds the queue full is not said
        while "STOPPING=1" not in said:
            said.extend(systemd.recv(4096).decode().splitlines()[:1])

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(100)
        listening = threading.Thread(target=listen)
        listening.start()
        try:
            site.run(NOTIFY_SOCKET=str(path), WATCHDOG_USEC="400000")
            [worker] = site.ready().values()
            assert "NOTIFY_SOCKET" not in psutil.Process(worker).environ()
            site.until(lambda: "STATUS=1 of 1 servers ready" in said, "the status")
            assert "READY=1" in said
            site.signal(signal.SIGHUP)
            site.until(lambda: "RELOADING=1" in said, "the reload")
            site.until(lambda: "READY=1" in said[said.index("RELOADING=1") :], "its end")
        finally:
            site.signal(signal.SIGTERM)
            assert site.ended() == 0
            listening.join()
    assert {"WATCHDOG=1", "STOPPING=1"} <= set(said)


def test_a_watched_status_ends_with_a_word_when_the_daemon_goes_away(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    site.ready()
    with subprocess.Popen(
        site.command("status", "--watch"),
        env=site.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        assert any("ready" in line for line in watching.stdout if line.startswith("a "))
        site.signal(signal.SIGTERM)
        _, said = watching.communicate(timeout=30)
    assert watching.returncode == 6
    assert said.startswith("tqd: the daemon has gone\n")


def test_a_full_disk_for_logs_stops_nobody_and_is_counted(site: Site) -> None:
    logs = site.folder / "logs"
    logs.mkdir()
    (logs / "a.log").symlink_to("/dev/full")
    if not (logs / "a.log").exists():
        pytest.skip("this system has no /dev/full")
    site.add("a")
    site.add("b")
    site.write(log={"dir": str(logs)})
    site.run()
    site.ready()
    lost = site.until(lambda: site.server("a")["log_dropped_bytes"], "output is lost")
    assert site.server("b")["log_dropped_bytes"] == 0
    assert "could not be written" in site.tqd("status", "a").stdout
    assert lost > 0
    site.until(lambda: "ready" in (logs / "b.log").read_text(), "the other log is written")
