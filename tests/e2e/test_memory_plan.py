"""The memory plan with real processes: who starts, who is refused and why, and what a kill changes."""

from __future__ import annotations

import os
import signal

from daemon.policy.claim import PROCESS_BYTES
from tests.e2e.conftest import Site

MIB = 2**20
ONE = "400MiB"  # one of the tiny servers needs some 260 MiB: its process, nearly all of it


def test_a_server_that_does_not_fit_is_blocked_with_the_numbers_and_starts_when_it_does(
    site: Site,
) -> None:
    site.add("first")
    site.add("second")
    site.write(memory_budget=ONE)
    site.run()
    site.ready("first")
    blocked = site.is_in("second", "blocked")
    assert blocked["reason_code"] == "insufficient_memory"
    assert blocked["reason"] is not None
    assert "of the 400.0 MiB for all servers are free: first holds" in blocked["reason"]
    shown = site.tqd("status").output
    assert "first holds" in shown
    assert "raise daemon.memory_budget" in shown
    assert site.tqd("start", "second").exit_code == 1

    assert site.tqd("stop", "first").exit_code == 0
    site.ready("second")
    assert site.tqd("start", "first").exit_code == 1
    assert site.server("second")["state"] == "ready"  # nothing is ended to make room


def test_an_edit_that_does_not_fit_is_rejected_before_anything_stops(site: Site) -> None:
    site.add("first")
    site.write(memory_budget=ONE)
    site.run()
    pids = site.ready("first")
    site.add("second")
    site.servers["first"]["max_context"] = 64  # a restart, if it were applied
    site.write(memory_budget=ONE)
    result = site.tqd("reload")
    assert result.exit_code == 2
    assert "servers.second: it does not fit: it needs" in result.output
    assert site.ready("first") == pids
    assert site.config()["state"] == "rejected"

    site.write(memory_budget="2GiB")
    assert site.tqd("reload").exit_code == 0
    assert site.ready("first", "second")["first"] != pids["first"]


def test_a_lower_budget_keeps_everything_running_and_says_so(site: Site) -> None:
    site.add("first")
    site.add("second")
    site.write(memory_budget="2GiB")
    site.run()
    pids = site.ready("first", "second")
    assert site.client.status()["memory"]["over_budget"] is False

    site.write(memory_budget=ONE)
    assert site.tqd("reload").exit_code == 0
    assert site.ready("first", "second") == pids
    memory = site.until(
        lambda: (it := site.client.status()["memory"])["over_budget"] and it, "over budget"
    )
    assert memory["budget_bytes"] == 400 * MIB
    assert "over budget; what runs goes on" in site.tqd("status").output

    site.tqd("stop", "second")
    assert site.tqd("start", "second").exit_code == 1
    assert site.server("second")["reason_code"] == "insufficient_memory"


def test_shares_reach_the_workers_and_follow_the_others(site: Site) -> None:
    port = site.add("first", kv={"budget": "none"}, max_concurrent=1)
    site.write(memory_budget="2GiB")
    site.run()
    site.ready("first")
    limit = site.get(port)[1]["memory_limit_bytes"]
    assert limit == site.server("first")["memory"]["planned_bytes"]
    assert PROCESS_BYTES < limit < 2048 * MIB

    site.servers["first"]["max_concurrent"] = 100  # without a limit on its caches it needs them all
    site.write(memory_budget="2GiB")
    pids = site.ready("first")
    assert site.tqd("reload").exit_code == 0
    site.until(lambda: site.get(port)[1]["memory_limit_bytes"] > limit, "the share has grown")
    assert site.ready("first") == pids


def test_a_newcomer_waits_for_what_running_requests_still_hold(site: Site) -> None:
    site.add("first", env={"STUB_PROMISED": str(380 * MIB)})
    site.write(memory_budget="600MiB")
    site.run()
    site.ready("first")
    site.until(
        lambda: site.server("first")["memory"]["held_bytes"] == 380 * MIB, "the promise counts"
    )
    site.add("second")
    site.write(memory_budget="600MiB")
    assert site.tqd("reload").exit_code == 0
    waiting = site.is_in("second", "starting")
    assert waiting["reason"] is not None
    assert waiting["reason"].startswith("waiting for memory: it needs")
    assert waiting["pid"] is None
    site.tqd("stop", "first")
    site.ready("second")


def test_a_kill_from_outside_is_recorded_and_memory_is_looked_at_before_the_next_start(
    site: Site,
) -> None:
    site.add("first")
    site.write()
    site.run()
    pid = site.ready("first")["first"]
    os.kill(pid, signal.SIGKILL)
    site.until(
        lambda: (it := site.server("first"))["state"] == "ready" and it["pid"] != pid, "back"
    )
    last = site.server("first")["last_exit"]
    assert last is not None
    assert last["classified"] == "killed_external"
    memory = site.client.status()["memory"]
    assert 0 < memory["available_bytes"] <= memory["total_bytes"]
