from __future__ import annotations

import json
from dataclasses import replace

from daemon.config.spec import ServerSpec
from daemon.ops.document import Document, ServerStatus
from daemon.ops.status import View, document, unready
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import Desired, State
from daemon.supervisor.workers import Report


def by_name(found: Document) -> dict[str, ServerStatus]:
    return {it["name"]: it for it in found["servers"]}


def test_the_document_is_json_and_every_section_has_its_promised_keys(view: View) -> None:
    found = document(view)
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == Document.__annotations__.keys()
    for server in found["servers"]:
        assert server.keys() == ServerStatus.__annotations__.keys()


def test_a_ready_server_tells_all_that_its_worker_reported(view: View) -> None:
    chat = by_name(document(view))["chat"]
    assert (chat["pid"], chat["launch"], chat["load_s"]) == (4312, 7, 8.4)
    assert chat["health"] == {"live": True, "ready": True, "heartbeat_age_s": 0.5}
    assert chat["requests"] is not None
    assert (chat["requests"]["running"], chat["requests"]["capacity"]) == (1, 8)
    assert chat["memory"] is not None
    assert chat["memory"]["weights_bytes"] == 4096
    assert chat["sampled_at"] == "2027-01-15T08:16:39.000Z"


def test_requested_and_effective_kv_stand_side_by_side_with_the_reason(view: View) -> None:
    kv = by_name(document(view))["chat"]["kv"]
    assert kv is not None
    assert (kv["requested"]["policy"], kv["requested"]["k"]) == ("balanced", "int8")
    layers = by_name(document(view))["chat"]["layers"]
    assert layers is not None
    assert layers[1] == {
        "first": 3, "last": 3, "kind": "sliding", "requested": "turbo8v4", "effective": "fp16",
        "reason": "a rule", "backend": "mlx", "backend_reason": None, "packing_backend": "mlx",
        "packing_reason": None,
    }  # fmt: skip
    assert kv["compression"] == 2.56
    assert kv["fallbacks"] == [{"layers": [3, 3], "mode": "fp16", "reason": "a rule"}]


def test_a_failed_server_tells_why_and_how_it_ended(view: View) -> None:
    code = by_name(document(view))["code"]
    assert (code["reason_code"], code["reason"], code["hint"]) == ("crashed", "why", "do")
    assert code["last_exit"] is not None
    assert (code["last_exit"]["code"], code["last_exit"]["tail"]) == (-9, ["a", "b"])
    assert code["health"] == {"live": False, "ready": False, "heartbeat_age_s": None}


def test_nothing_is_made_up_about_a_server_that_never_ran(view: View) -> None:
    idle = by_name(document(view))["idle"]
    unknown = ("pid", "model", "requests", "throughput", "memory", "last_exit", "sampled_at")
    assert all(idle[key] is None for key in unknown)  # type: ignore[literal-required]
    assert idle["kv"] is not None
    assert idle["kv"]["bytes_per_token"] is None
    assert idle["layers"] is None


def test_what_a_dead_worker_last_said_stays_but_not_beside_a_new_one(view: View) -> None:
    chat = view.fleet.servers["chat"]
    dead = replace(chat, worker=None, state=State.BACKOFF)
    gone = replace(view, fleet=Fleet("b", {"chat": dead}))
    last = by_name(document(gone))["chat"]["requests"]
    assert last is not None
    assert (last["running"], last["waiting"], last["total"]) == (0, 0, 9)

    old = Report(6, view.reports["chat"].ready, view.reports["chat"].snapshot, 1.0)
    later = replace(view, reports={"chat": old})
    assert by_name(document(later))["chat"]["requests"] is None


def test_the_verdict_is_that_of_the_worst(view: View) -> None:
    def verdict(*names: str) -> str:
        servers = {name: view.fleet.servers[name] for name in names}
        config = replace(view.config, state="applied")
        return document(replace(view, fleet=Fleet("b", servers), config=config))["daemon"][
            "verdict"
        ]

    assert document(view)["daemon"]["verdict"] == "failing"
    assert verdict("chat", "idle") == "ok"
    starting = replace(view.fleet.servers["chat"], state=State.LOADING)
    loading = replace(view, fleet=Fleet("b", {"chat": starting}))
    assert document(loading)["daemon"]["verdict"] == "degraded"


def test_a_rejected_file_is_told_with_its_places_and_not_in_sync(view: View) -> None:
    config = document(view)["config"]
    assert (config["state"], config["in_sync"], config["hash_applied"]) == (
        "rejected",
        False,
        "abc",
    )
    assert config["errors"] == [
        {"file": "/etc/servers.yaml", "line": 3, "col": 5, "path": "servers.a", "message": "bad", "hint": "good"}
    ]  # fmt: skip


def test_a_server_that_waits_says_what_for(view: View) -> None:
    waiting = replace(view.fleet.servers["idle"], state=State.STARTING, desired=Desired.RUNNING)
    alone = replace(view, fleet=Fleet("b", {"idle": waiting}))
    assert by_name(document(alone))["idle"]["reason"] == "waiting to load"
    behind = replace(view, fleet=Fleet("b", {"idle": waiting}, leftovers={"idle": 9}))
    assert by_name(document(behind))["idle"]["reason"] == (
        "waiting for pid 9 of an earlier daemon to end"
    )


def test_secrets_are_not_in_the_document(view: View) -> None:
    spec = ServerSpec(model="m", port=1, api_key="hunter2", env={"TOKEN": "hunter2"})
    keyed = replace(view.fleet.servers["chat"], spec=spec)
    prepared = replace(view.prepared["chat"], spec=spec, api_key="hunter2")
    found = document(replace(view, fleet=Fleet("b", {"chat": keyed}), prepared={"chat": prepared}))
    assert "hunter2" not in json.dumps(found)


def test_ready_means_every_server_that_is_meant_to_run_or_those_asked_for(view: View) -> None:
    assert unready(view.fleet) == {"code": "failed: why"}
    assert unready(view.fleet, ["chat"]) == {}
    assert unready(view.fleet, ["idle", "nobody"]) == {
        "idle": "stopped",
        "nobody": "no server of that name",
    }


def test_output_that_no_disk_could_take_is_counted_in_the_status(view: View) -> None:
    lost = {it["name"]: it["log_dropped_bytes"] for it in document(view)["servers"]}
    assert lost == {"chat": 0, "code": 512, "idle": 0}
