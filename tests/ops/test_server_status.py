from __future__ import annotations

from dataclasses import replace

from daemon.ops.server_status import server_status
from daemon.ops.view import View
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import Desired, State
from daemon.supervisor.workers import Report


def test_a_ready_server_tells_all_that_its_worker_reported(view: View) -> None:
    chat = server_status(view, view.fleet.servers["chat"])
    assert (chat["pid"], chat["launch"], chat["load_s"]) == (4312, 7, 8.4)
    assert chat["health"] == {"live": True, "ready": True, "heartbeat_age_s": 0.5}
    assert chat["requests"] is not None
    assert (chat["requests"]["running"], chat["requests"]["capacity"]) == (1, 8)
    assert chat["memory"] is not None
    assert chat["memory"]["weights_bytes"] == 4096
    assert chat["sampled_at"] == "2027-01-15T08:16:39.000Z"


def test_a_failed_server_tells_why_and_how_it_ended(view: View) -> None:
    code = server_status(view, view.fleet.servers["code"])
    assert (code["reason_code"], code["reason"], code["hint"]) == ("crashed", "why", "do")
    assert code["last_exit"] is not None
    assert (code["last_exit"]["code"], code["last_exit"]["tail"]) == (-9, ["a", "b"])
    assert code["health"] == {"live": False, "ready": False, "heartbeat_age_s": None}


def test_nothing_is_made_up_about_a_server_that_never_ran(view: View) -> None:
    idle = server_status(view, view.fleet.servers["idle"])
    unknown = ("pid", "model", "requests", "throughput", "memory", "last_exit", "sampled_at")
    assert all(idle[key] is None for key in unknown)  # type: ignore[literal-required]
    assert idle["kv"] is not None
    assert idle["kv"]["bytes_per_token"] is None
    assert idle["layers"] is None


def test_what_a_dead_worker_last_said_stays_but_not_beside_a_new_one(view: View) -> None:
    chat = view.fleet.servers["chat"]
    dead = replace(chat, worker=None, state=State.BACKOFF)
    gone = replace(view, fleet=Fleet("b", {"chat": dead}))
    last = server_status(gone, gone.fleet.servers["chat"])["requests"]
    assert last is not None
    assert (last["running"], last["waiting"], last["total"]) == (0, 0, 9)

    old = Report(6, view.reports["chat"].ready, view.reports["chat"].snapshot, 1.0)
    later = replace(view, reports={"chat": old})
    assert server_status(later, later.fleet.servers["chat"])["requests"] is None


def test_a_server_that_waits_says_what_for(view: View) -> None:
    waiting = replace(view.fleet.servers["idle"], state=State.STARTING, desired=Desired.RUNNING)
    alone = replace(view, fleet=Fleet("b", {"idle": waiting}))
    assert server_status(alone, alone.fleet.servers["idle"])["reason"] == "waiting to load"
    behind = replace(view, fleet=Fleet("b", {"idle": waiting}, leftovers={"idle": 9}))
    assert server_status(behind, behind.fleet.servers["idle"])["reason"] == (
        "waiting for pid 9 of an earlier daemon to end"
    )


def test_output_that_no_disk_could_take_is_counted_in_the_status(view: View) -> None:
    told = [server_status(view, it) for it in view.fleet.servers.values()]
    lost = {it["name"]: it["log_dropped_bytes"] for it in told}
    assert lost == {"chat": 0, "code": 512, "idle": 0}
