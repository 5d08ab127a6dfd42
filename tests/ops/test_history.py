from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from daemon.errors import Problem
from daemon.ops.events import EventLog
from daemon.ops.history import RELOADS, TRANSITIONS, History
from daemon.ops.view import View
from daemon.supervisor.conclusions import Conclusion
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import Cause, Divergence, LastExit, Section, Server, State

PROBLEM = Problem("/etc/servers.yaml", 3, 5, "servers.a", "bad", "good")


@pytest.fixture
def log() -> EventLog:
    return EventLog(boot="0badcafe")


@pytest.fixture
def history(log: EventLog, tmp_path: Path) -> History:
    return History(log, tmp_path / "reloads.json", lambda: datetime(2026, 11, 29, tzinfo=UTC))


def fleet(*servers: Server, closing: bool = False) -> Fleet:
    return Fleet("boot", {it.name: it for it in servers}, closing=closing)


def names(log: EventLog) -> list[str]:
    return [event["event"] for event in log.after(0).events]


def test_a_change_of_state_is_kept_and_told_with_its_reason_launch_and_pid(
    history: History, log: EventLog, view: View
) -> None:
    chat = view.fleet.servers["chat"]
    ended = LastExit(7, -9, 999.0, "killed_external")
    cause = Cause("killed_external", "killed from outside", "look at the kernel's log")
    after = replace(chat, worker=None, state=State.BACKOFF, cause=cause, last_exit=ended)
    history.fleet_changed(fleet(), fleet(chat))
    history.fleet_changed(fleet(chat), fleet(after))

    assert names(log) == ["server.added", "server.changed", "server.changed"]
    change = {
        "from": "ready", "to": "backoff", "reason": "killed from outside", "reason_code": "killed_external",
        "hint": "look at the kernel's log", "launch": 7, "pid": 4312, "exit_code": -9,
    }  # fmt: skip
    assert log.after(2).events[0]["data"] == {"server": "chat", **change}
    assert history.server("chat")[-1] == {"at": "2026-11-29T00:00:00.000Z", **change}


def test_a_server_that_goes_back_to_its_previous_section_says_so_though_its_state_stays(
    history: History, log: EventLog, view: View
) -> None:
    before = replace(view.fleet.servers["chat"], state=State.STARTING, cause=None)
    section = Section(before.spec, before.spec_hash, before.claim)
    after = replace(before, divergence=Divergence(section, Cause("crashed", "exited with 1"), 9.0))
    history.fleet_changed(fleet(), fleet(before))
    history.fleet_changed(fleet(before), fleet(after))
    history.fleet_changed(fleet(after), fleet(replace(after, since=10.0)))

    assert len(names(log)) == 3
    change = history.server("chat")[-1]
    assert (change["from"], change["to"], change["reason_code"]) == (
        "starting", "starting", "crashed",
    )  # fmt: skip
    assert change["reason"] == (
        "went back to its previous section; the new one did not become ready: exited with 1"
    )


def test_a_heartbeat_is_no_change_but_another_reason_for_the_same_state_is(
    history: History, log: EventLog, view: View
) -> None:
    code = view.fleet.servers["code"]
    history.fleet_changed(fleet(), fleet(code))
    history.fleet_changed(fleet(code), fleet(replace(code, since=901.0)))
    assert len(names(log)) == 2
    other = replace(code, cause=Cause("port_in_use", "taken"))
    history.fleet_changed(fleet(code), fleet(other))
    assert (history.server("code")[-1]["from"], history.server("code")[-1]["to"]) == (
        "failed",
        "failed",
    )


def test_a_server_that_leaves_takes_its_history_along(
    history: History, log: EventLog, view: View
) -> None:
    chat = view.fleet.servers["chat"]
    history.fleet_changed(fleet(), fleet(chat))
    history.fleet_changed(fleet(chat), fleet())
    assert (names(log)[-1], history.document()["servers"]) == ("server.removed", {})


def test_the_end_of_the_daemon_is_told_once(history: History, log: EventLog) -> None:
    history.fleet_changed(fleet(), fleet(closing=True))
    history.fleet_changed(fleet(closing=True), fleet(closing=True))
    assert names(log) == ["daemon.stopping"]


def test_only_the_last_changes_and_reloads_are_kept(history: History, view: View) -> None:
    ready = view.fleet.servers["chat"]
    gone = replace(ready, state=State.BACKOFF)
    history.fleet_changed(fleet(), fleet(ready))
    for _ in range(TRANSITIONS):
        history.fleet_changed(fleet(ready), fleet(gone))
        history.fleet_changed(fleet(gone), fleet(ready))
    assert len(history.server("chat")) == TRANSITIONS
    for generation in range(RELOADS + 5):
        history.reloaded(Conclusion("applied", generation))
    kept = [it["generation"] for it in history.document()["reloads"]]
    assert kept == list(range(5, RELOADS + 5))


def test_a_rejected_reading_is_told_with_its_places_and_outlives_the_daemon(
    history: History, log: EventLog, tmp_path: Path
) -> None:
    history.reloaded(Conclusion("rejected", 4, problems=(PROBLEM,)))
    told = log.after(0).events[0]
    assert told["event"] == "config.reloaded"
    assert told["data"] == {
        "result": "rejected", "generation": 4, "steps": [], "warnings": [],
        "errors": [{"file": "/etc/servers.yaml", "line": 3, "col": 5, "path": "servers.a", "message": "bad", "hint": "good"}],
    }  # fmt: skip
    file = tmp_path / "reloads.json"
    assert file.stat().st_mode & 0o777 == 0o600
    later = History(EventLog(), file, lambda: datetime(2026, 11, 30, tzinfo=UTC))
    assert later.document()["reloads"] == history.document()["reloads"]


@pytest.mark.parametrize("text", ["", "{", "{}", "[1, null]", '[{"at": "now"}]'])
def test_a_damaged_file_of_reloads_is_an_empty_history(tmp_path: Path, text: str) -> None:
    (tmp_path / "reloads.json").write_text(text)
    found = History(EventLog(), tmp_path / "reloads.json", lambda: datetime.now(UTC))
    assert found.document()["reloads"] == []


def test_a_full_disk_costs_nothing_but_the_file(log: EventLog, tmp_path: Path) -> None:
    history = History(log, tmp_path / "reloads.json", lambda: datetime.now(UTC))
    (tmp_path / "reloads.json").mkdir()  # cannot be replaced by a file
    history.reloaded(Conclusion("noop", 1))
    assert [it["result"] for it in history.document()["reloads"]] == ["noop"]


def test_changes_that_wait_for_a_reload_are_told(history: History, log: EventLog) -> None:
    history.pending(["restart chat: port 1 → 2"])
    assert log.after(0).events[0]["data"] == {"steps": ["restart chat: port 1 → 2"]}
