"""What becomes of running servers while servers.yaml is edited, well and badly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from daemon.config.locate import Located, fingerprint

if TYPE_CHECKING:
    from tests.e2e.conftest import Site


def test_a_broken_file_changes_nothing_until_it_is_whole_again(site: Site) -> None:
    for name in ("a", "b", "c"):
        site.add(name)
    site.write()
    site.run()
    pids = site.ready()
    good = site.file.read_text()

    site.write("servers: [\n")
    site.signal(signal.SIGHUP)

    config = site.until(lambda: (it := site.config())["state"] == "rejected" and it, "rejected")
    assert config["errors"][0]["line"] == 2
    assert site.ready() == pids

    reload = site.tqd("reload")
    assert (reload.exit_code, "servers.yaml:2:1" in reload.stderr) == (2, True)

    site.write(good)
    config = site.until(lambda: (it := site.config())["state"] == "applied" and it, "applied")
    assert (config["errors"], site.ready()) == ([], pids)


def test_twenty_edits_in_two_seconds_never_run_two_workers_of_one_server(site: Site) -> None:
    site.add("a")
    site.add("b")
    site.write()
    site.run()
    site.ready()
    most: Counter[str] = Counter()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for name, count in Counter(site.workers().values()).items():
                most[name] = max(most[name], count)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(20):
            site.servers["a"]["env"]["ROUND"] = str(number)
            site.servers["a"]["labels"] = {"round": str(number)}
            site.write()
            time.sleep(0.1)
        site.until(lambda: site.server("a")["labels"] == {"round": "19"}, "the last edit")
        site.ready()
    finally:
        done.set()
        watcher.join()
    assert most == {"a": 1, "b": 1}


def test_only_the_edited_server_restarts_and_the_streams_of_others_end_whole(site: Site) -> None:
    port = site.add("a")
    for name in ("b", "c"):
        site.add(name)
    site.write()
    site.run()
    before = site.ready()

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stream", timeout=30) as stream:
        assert stream.readline() == b"0\n"
        site.servers["b"]["max_context"] = 64
        site.write()
        site.applied(2)
        after = site.ready()
        assert stream.read().splitlines()[-1] == b"49"

    assert {name for name in before if before[name] != after[name]} == {"b"}


def test_a_live_change_keeps_the_worker_and_reaches_it(site: Site) -> None:
    port = site.add("a")
    site.write()
    site.run()
    pids = site.ready()

    site.servers["a"] |= {
        "aliases": ["best"],
        "labels": {"team": "x"},
        "stop_grace": "2s",
        "restart": {"max": 7},
    }
    site.write(log={"level": "debug"})

    site.until(lambda: site.get(port)[1]["aliases"] == ["best"], "the worker knows its alias")
    assert site.server("a")["labels"] == {"team": "x"}
    assert site.server("a")["restarts"]["max"] == 7
    assert site.ready() == pids


def in_place(site: Site, text: str) -> None:
    site.file.write_text(text)


def by_rename(site: Site, text: str) -> None:
    site.write(text)


def by_symlink_swap(site: Site, text: str) -> None:
    """As Kubernetes updates a mounted ConfigMap."""
    folder = site.folder / "..version-2"
    folder.mkdir()
    (folder / "servers.yaml").write_text(text)
    (site.folder / "..data.new").symlink_to(folder.name)
    (site.folder / "..data.new").replace(site.folder / "..data")


def by_delete_and_create(site: Site, text: str) -> None:
    site.file.unlink()
    time.sleep(1.0)
    assert site.server("a")["state"] == "ready"
    site.file.write_text(text)


def within_one_second_at_the_same_size(site: Site, text: str) -> None:
    at = site.file.stat()
    assert len(text) == at.st_size
    site.file.write_text(text)
    second = at.st_mtime_ns // 10**9 * 10**9
    os.utime(site.file, ns=(second, second + (at.st_mtime_ns + 1) % 10**9))


@pytest.mark.parametrize(
    "save",
    [
        in_place,
        by_rename,
        by_symlink_swap,
        by_delete_and_create,
        within_one_second_at_the_same_size,
    ],
)
def test_an_edit_is_applied_once_however_it_is_saved(site: Site, save: object) -> None:
    site.add("a", env={"ROUND": "1"})
    site.write()
    if save is by_symlink_swap:
        (site.folder / "..version-1").mkdir()
        site.file.rename(site.folder / "..version-1" / "servers.yaml")
        (site.folder / "..data").symlink_to("..version-1")
        site.file.symlink_to("..data/servers.yaml")
    site.run()
    site.ready()

    site.servers["a"]["env"]["ROUND"] = "2"
    save(site, site.text())  # type: ignore[operator]

    site.until(lambda: site.server("a")["launch"] == 2, "the worker is replaced")
    site.ready()
    assert site.config()["generation"] == 2


def test_a_port_that_is_taken_refuses_the_edit_and_the_old_worker_serves_on(site: Site) -> None:
    port = site.add("a")
    site.write()
    site.run()
    pids = site.ready()

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        site.servers["a"]["port"] = stranger.getsockname()[1]
        site.write()
        refusal = site.tqd("reload")
        assert refusal.exit_code == 2
        assert f"is in use by pid {os.getpid()}" in refusal.stderr
        assert "servers.a.port" in refusal.stderr
        assert site.get(port)[0] == 200
        assert site.ready() == pids

    assert site.tqd("reload").exit_code == 0
    site.until(lambda: site.server("a")["launch"] == 2, "the move")
    site.ready()


def test_two_servers_that_swap_their_ports_converge(site: Site) -> None:
    site.add("a")
    site.add("b")
    site.write()
    site.run()
    site.ready()
    a, b = site.servers["a"], site.servers["b"]

    a["port"], b["port"] = b["port"], a["port"]
    site.write()
    site.until(lambda: {site.server(it)["launch"] for it in "ab"} == {2}, "both are replaced")
    site.ready()

    assert site.get(a["port"])[1]["name"] == "a"
    assert site.get(b["port"])[1]["name"] == "b"


def test_a_reload_during_a_slow_drain_is_not_lost(site: Site) -> None:
    site.add("a", env={"STUB_DRAIN_S": "1"})
    site.write()
    site.run()
    site.ready()
    for number in ("2", "3"):
        site.servers["a"]["env"]["ROUND"] = number
        site.servers["a"]["labels"] = {"round": number}
        site.write()
        site.signal(signal.SIGHUP)
        site.until(lambda number=number: site.server("a")["labels"] == {"round": number}, "seen")
    site.until(lambda: site.server("a")["launch"] == 2, "one restart for both")
    site.ready()
    assert site.server("a")["worker_spec_hash"] == site.server("a")["spec_hash"]


def without_servers(site: Site) -> str:
    servers, site.servers = site.servers, {}
    text = site.text()
    site.servers = servers
    return text


def test_an_edit_that_removes_everything_waits_for_a_newer_file(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    pids = site.ready()
    whole = site.file.read_text()

    site.write(without_servers(site))
    site.until(lambda: "it removes much" in site.daemon_output(), "the edit waits")
    site.write(whole)
    site.until(lambda: site.tqd("diff").stdout == "nothing would change\n", "the file is whole")

    assert site.ready() == pids


def test_a_signal_while_an_edit_waits_ends_the_daemon_and_applies_nothing(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    site.ready()
    site.write(without_servers(site))
    site.until(lambda: "it removes much" in site.daemon_output(), "the edit waits")
    site.signal(signal.SIGTERM)
    assert site.ended() == 0

    site.file.unlink()  # what was last good is what was in force, not what waited
    site.run()
    site.ready("a")


def test_a_drain_that_does_not_end_is_bounded(site: Site) -> None:
    site.add("a", env={"STUB_DRAIN_S": "60"}, drain_timeout="300ms", stop_grace="500ms")
    site.write()
    site.run()
    site.ready()
    site.servers["a"]["max_context"] = 64
    site.write()
    site.until(lambda: site.server("a")["launch"] == 2, "the worker is replaced")
    site.ready()


def test_manual_reload_shows_what_is_pending_and_applies_it_on_command(site: Site) -> None:
    site.add("a")
    site.write(reload="manual")
    site.run()
    pids = site.ready()

    site.servers["a"]["max_context"] = 64
    site.write(reload="manual")
    config = site.until(lambda: (it := site.config())["state"] == "pending" and it, "pending")
    assert config["pending"] == ["restart a: max_context null → 64"]
    assert site.tqd("diff").stdout == "restart a: max_context null → 64\n"
    assert site.ready() == pids

    restart = site.tqd("restart", "a")
    assert (restart.exit_code, "not in force: restart a: max_context" in restart.stderr) == (
        1,
        True,
    )
    assert site.ready() == pids

    assert site.tqd("reload").stdout == "restart a: max_context null → 64\n"
    site.until(lambda: site.server("a")["launch"] == 2, "applied")


def test_a_change_of_the_status_address_needs_another_daemon(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    site.ready()

    site.status_port = site.free_port()
    site.write()

    refusal = site.tqd("reload")
    assert refusal.exit_code == 2
    assert "needs a daemon restart" in refusal.stderr


def test_a_model_that_appears_later_lets_its_server_start(site: Site) -> None:
    site.add("a")
    (site.folder / "model").rename(site.folder / "elsewhere")
    site.write()
    site.run()
    assert site.is_in("a", "blocked")["reason_code"] == "model_missing"

    (site.folder / "elsewhere").rename(site.folder / "model")
    assert site.tqd("start", "a").exit_code == 0
    assert site.server("a")["state"] == "ready"


def test_a_model_that_goes_later_holds_no_other_edit_up_and_its_worker_runs_on(site: Site) -> None:
    _model_of_its_own(site, "b")
    site.add("a")
    site.add("b", model="./b")
    site.write()
    site.run()
    pids = site.ready()
    (site.folder / "b").rename(site.folder / "away")

    site.servers["a"]["labels"] = {"team": "search"}
    site.write()
    assert site.tqd("diff").stdout.startswith("live a: labels.team")
    site.applied(2)
    assert site.ready() == pids
    [warning] = site.config()["warnings"]
    assert f"there is no folder {site.folder}/b; its worker goes on" in warning
    assert "its worker goes on" in " ".join(site.tqd("status").stdout.split())

    site.servers["b"]["max_context"] = 64
    site.write()
    for command in (["diff"], ["reload"], ["restart", "b"], ["restart", "--all"]):
        refusal = site.tqd(*command)
        assert refusal.exit_code == 2, command
        assert "servers.b.model: there is no folder" in refusal.stderr
    assert site.ready() == pids

    del site.servers["b"]["max_context"]
    site.write()
    (site.folder / "away").rename(site.folder / "b")
    site.until(lambda: site.config()["state"] == "applied", "the change is taken back")
    assert site.tqd("restart", "b").exit_code == 0
    assert site.server("a")["pid"] == pids["a"]


def test_a_worker_whose_model_went_and_came_back_is_replaced_when_it_dies(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    site.ready()
    (site.folder / "model").rename(site.folder / "away")
    site.servers["a"]["labels"] = {"team": "search"}
    site.write()
    site.applied(2)
    (site.folder / "away").rename(site.folder / "model")

    os.kill(site.server("a")["pid"], signal.SIGKILL)
    site.until(lambda: site.server("a")["last_exit"], "the end of the worker")
    site.ready()


def test_a_damaged_model_blocks_its_server_at_a_cold_start_and_no_other(site: Site) -> None:
    _model_of_its_own(site, "b")
    site.add("a")
    site.add("b", model="./b")
    config = site.folder / "b" / "config.json"
    whole = config.read_text()
    config.write_text(whole[:20])
    site.write()
    site.run()
    site.ready("a")
    assert site.is_in("b", "blocked")["reason_code"] == "model_fault"

    config.write_text(whole)
    assert site.tqd("start", "b").exit_code == 0
    site.ready()


def test_a_model_of_another_kind_than_before_blocks_its_server_at_a_cold_start(site: Site) -> None:
    _model_of_its_own(site, "b")
    site.add("a")
    site.add("b", model="./b")
    site.write()
    site.run()
    site.ready()
    site.signal(signal.SIGTERM)
    assert site.ended() == 0

    config = site.folder / "b" / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace("llama", "no_such_family"))
    site.run()
    site.ready("a")
    assert "no_such_family" in str(site.is_in("b", "blocked")["reason"])
    assert site.config()["state"] == "stale"

    config.write_text(whole)
    assert site.tqd("start", "b").exit_code == 0
    assert site.tqd("reload").exit_code == 0
    assert site.config()["state"] == "applied"


def _model_of_its_own(site: Site, name: str) -> None:
    shutil.copytree(site.folder / "model", site.folder / name)


def test_recorded_evidence_is_applied_by_reload_without_an_edit(site: Site) -> None:
    site.add("a", kv={"mode": "turbo4v4"})
    site.write()
    site.run()
    pids = site.ready()
    assert "unchanged" in site.tqd("reload", "--json").stdout

    model = fingerprint(Located(site.folder / "model"))
    entry = {"fingerprint": model, "key_bits": 4, "evidence": "measured"}
    site.state.allowlist.write_text(json.dumps({"entries": [entry]}))
    assert "applied" in site.tqd("reload", "--json").stdout

    site.until(lambda: site.ready() != pids, "another worker")
    assert "unchanged" in site.tqd("reload", "--json").stdout
