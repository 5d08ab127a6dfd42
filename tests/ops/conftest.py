"""A fleet in which something of everything has happened, and the document about it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from daemon.config import wire
from daemon.config.prepare import PreparedServer
from daemon.config.spec import ServerSpec
from daemon.errors import Problem
from daemon.ops.view import View
from daemon.policy.spec import KvRequest
from daemon.supervisor.conclusions import ConfigStatus
from daemon.supervisor.counts import Counts
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import (
    Address,
    Cause,
    Desired,
    LastExit,
    Server,
    State,
    Worker,
)
from daemon.supervisor.workers import Report

NOW = 1000.0
KV = KvRequest(
    policy="balanced", k="int8", v="turbo4", explicit=False, boundary_v=0, boundary_mode="int8",
    boundary_k="auto", sink_tokens=4, tail_tokens=32, strict=False,
)  # fmt: skip
READY = wire.Ready(
    nonce="n", spec_hash="h", load_s=8.4,
    model=wire.ModelReport(
        id="org/m", path="/m", model_type="llama", layers=4, max_context=128, weights_bytes=4096,
        device="gpu", mlx_version="1", mlx_lm_version="2",
    ),
    kv=wire.KvReport(
        policy="balanced", summary="turbo8v4 on 3 of 4 layers", effective={"turbo8v4": 3, "fp16": 1},
        layers=(
            wire.LayerReport(
                first=0, last=2, kind="full", requested="turbo8v4", effective="turbo8v4", backend="reference",
                backend_reason="the metal kernels fail", packing_backend="metal",
            ),
            wire.LayerReport(
                first=3, last=3, kind="sliding", requested="turbo8v4", effective="fp16", reason="a rule",
            ),
        ),
        sink_tokens=4, tail_tokens=32, backend="reference", bytes_per_token=100.0, bytes_per_token_fp16=256.0,
    ),
)  # fmt: skip
SNAPSHOT = wire.Snapshot(
    generation=7, running=1, waiting=2, requests_total=9, errors_total=1, rejected_total=2,
    cancelled_total=3, prompt_tokens_total=90, generation_tokens_total=45, prompt_tps=10.0,
    decode_tps=5.0, kv_bytes=1024, kv_tokens=8, mlx_active_bytes=2048, mlx_cache_bytes=0,
    mlx_peak_bytes=4096,
    open=(wire.OpenRequest(id="req_1", age_s=2.5, stream=True, prompt_tokens=9, completion_tokens=4),),
)  # fmt: skip


def server(name: str, port: int, **changes: object) -> Server:
    plain = Server(name, ServerSpec(model="org/m", port=port), "h", Desired.RUNNING, since=900.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture
def view() -> View:
    worker = Worker(
        7, "n", "h", Address("127.0.0.1", 1), started_at=980.0, moved_at=999.5, pid=4312,
        fraction=1.0, ready_at=990.0,
    )  # fmt: skip
    exit_ = LastExit(2, -9, 950.0, "killed_external", ("a", "b"))
    servers = (
        server("chat", 1, state=State.READY, worker=worker, launches=7),
        server("code", 2, state=State.FAILED, cause=Cause("crashed", "why", "do"), last_exit=exit_),
        server("idle", 3, state=State.STOPPED, desired=Desired.STOPPED),
    )
    return View(
        now=NOW,
        seq=12,
        wall=lambda at: datetime.fromtimestamp(1_800_000_000 + at, UTC),
        fleet=Fleet("boot", {it.name: it for it in servers}),
        prepared={
            it.name: PreparedServer(it.name, "org/m", it.spec, KV, "h", "l") for it in servers
        },
        machine=None,
        reading=None,
        reports={"chat": Report(7, READY, SNAPSHOT, 999.0)},
        config=ConfigStatus(
            Path("/etc/servers.yaml"),
            state="rejected",
            hash_applied="abc",
            problems=(Problem("/etc/servers.yaml", 3, 5, "servers.a", "bad", "good"),),
        ),
        reload_mode="auto",
        desired_source=lambda name: "config",
        log_path=lambda name: Path(f"/logs/{name}.log"),
        log_bytes_dropped=lambda name: 512 if name == "code" else 0,
        counts=Counts(),
        version="1.2.3",
        mlx_version="0.0.1",
        backend="cpu",
        pid=42,
        started=400.0,
        state_dir=Path("/state"),
        status_endpoint="http://127.0.0.1:8700",
        status_endpoint_error=None,
    )
