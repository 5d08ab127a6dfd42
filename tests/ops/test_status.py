from __future__ import annotations

import json
from dataclasses import replace

from daemon.config.spec import ServerSpec
from daemon.ops.document import DaemonStatus, Document, ServerStatus
from daemon.ops.status import document, unready
from daemon.ops.view import View
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import State


def by_name(found: Document) -> dict[str, ServerStatus]:
    return {it["name"]: it for it in found["servers"]}


def test_the_document_is_json_and_every_section_has_its_promised_keys(view: View) -> None:
    found = document(view)
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == Document.__annotations__.keys()
    assert found["daemon"].keys() == DaemonStatus.__annotations__.keys()
    assert (found["daemon"]["backend"], found["daemon"]["mlx_version"]) == (
        view.backend,
        view.mlx_version,
    )
    for server in found["servers"]:
        assert server.keys() == ServerStatus.__annotations__.keys()


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
