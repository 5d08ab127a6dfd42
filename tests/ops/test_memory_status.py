"""The memory sections of the document: of the machine, of a server that runs, and of one that does not."""

from __future__ import annotations

from dataclasses import replace

from daemon.config.machine import HostMemory, Machine
from daemon.ops.document import MachineMemory, Memory
from daemon.ops.status import document
from daemon.ops.view import View
from daemon.policy.claim import Claim
from daemon.supervisor.gauge import Reading

CLAIM = Claim(4096, 1000, 1000, 500, 4000)


def with_memory(view: View, budget: int) -> View:
    servers = dict(view.fleet.servers)
    worker = servers["chat"].worker
    assert worker is not None
    worker = replace(worker, claim=CLAIM, share=8000, promised=9000, used=7000)
    servers["chat"] = replace(servers["chat"], worker=worker, claim=CLAIM)
    servers["idle"] = replace(servers["idle"], claim=CLAIM)
    return replace(
        view,
        fleet=replace(view.fleet, servers=servers, budget=budget),
        machine=Machine(20_000, "cuda", "NVIDIA H200"),
        reading=Reading(HostMemory(64_000, 30_000, 5), {("chat", 7): 1234, ("chat", 6): 9}),
    )


def test_the_machine_tells_what_is_planned_used_and_left(view: View) -> None:
    memory = document(with_memory(view, 15_000))["memory"]
    assert memory == {
        "device": "cuda", "device_name": "NVIDIA H200", "total_bytes": 20_000, "budget_bytes": 15_000,
        "planned_bytes": 9000, "free_bytes": 6000, "over_budget": False, "used_footprint_bytes": 7000,
        "available_bytes": 30_000, "swap_used_bytes": 5, "wired_bytes": None,
        "unattributed_wired_bytes": None, "pressure": None,
    }  # fmt: skip
    assert memory.keys() == MachineMemory.__annotations__.keys()
    over = document(with_memory(view, 8999))["memory"]
    assert over is not None
    assert (over["over_budget"], over["free_bytes"]) == (True, 0)


def test_what_is_wired_beyond_what_mlx_holds_here_is_told_apart(view: View) -> None:
    view = with_memory(view, 15_000)
    host = HostMemory(64_000, 30_000, 5, wired_bytes=10_000, pressure="critical")
    memory = document(replace(view, reading=Reading(host)))["memory"]
    assert memory is not None
    assert memory["pressure"] == "critical"
    assert memory["wired_bytes"] == 10_000
    assert memory["unattributed_wired_bytes"] == 10_000 - 2048  # active arrays and cache of chat

    less = document(replace(view, reading=Reading(replace(host, wired_bytes=1000))))["memory"]
    assert less is not None
    assert less["unattributed_wired_bytes"] == 0


def test_a_server_has_its_plan_beside_what_it_uses(view: View) -> None:
    servers = {it["name"]: it for it in document(with_memory(view, 15_000))["servers"]}
    assert servers["chat"]["memory"] == {
        "needs_bytes": 6596, "wants_bytes": 10_096, "planned_bytes": 8000, "held_bytes": 9000,
        "weights_bytes": 4096, "kv_bytes": 1024, "kv_reserved_bytes": 0, "kv_limit_bytes": None,
        "mlx_active_bytes": 2048, "mlx_cache_bytes": 0, "mlx_peak_bytes": 4096, "process_footprint_bytes": 1234,
    }  # fmt: skip
    idle = servers["idle"]["memory"]
    assert idle is not None
    assert idle.keys() == Memory.__annotations__.keys()
    assert (idle["needs_bytes"], idle["planned_bytes"], idle["held_bytes"]) == (6596, None, 0)
    assert idle["process_footprint_bytes"] is None
