"""The status document: everything an operator asks about, from what the supervisor already knows.

Building it asks nobody anything: a hung worker cannot hang it, and each worker's numbers say when they
were sampled.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from daemon.config.machine import Machine
from daemon.config.prepare import PreparedServer
from daemon.config.wire import KvReport
from daemon.errors import Problem
from daemon.ops.document import (
    SCHEMA,
    ConfigSection,
    DivergentStatus,
    Document,
    ExitStatus,
    Fallback,
    Kv,
    LayerGroup,
    MachineMemory,
    Memory,
    ModelStatus,
    OpenRequests,
    ProblemStatus,
    Requests,
    ServerStatus,
    Throughput,
    Verdict,
)
from daemon.supervisor import room
from daemon.supervisor.counts import Counts
from daemon.supervisor.gauge import Reading
from daemon.supervisor.plan import Fleet, diverged
from daemon.supervisor.reload import ConfigStatus
from daemon.supervisor.server import Desired, LastExit, Server, State
from daemon.supervisor.workers import Report


@dataclass(frozen=True)
class View:
    """What the document is made of. *wall* turns a time of the supervisor's clock into a moment."""

    now: float
    seq: int
    wall: Callable[[float], datetime]
    fleet: Fleet
    prepared: Mapping[str, PreparedServer]
    reports: Mapping[str, Report]
    machine: Machine | None
    reading: Reading | None
    config: ConfigStatus
    reload_mode: str
    desired_source: Callable[[str], str]
    log_path: Callable[[str], Path]
    log_bytes_dropped: Callable[[str], int]
    counts: Counts
    version: str
    mlx_version: str
    backend: str
    pid: int
    started: float
    state_dir: Path
    status_endpoint: str | None
    status_endpoint_error: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is told of one server, times as the supervisor's clock has them.

    Equal facts make equal documents, but for the age of the heartbeat, as long as the clock is not set.
    """

    server: Server
    prepared: PreparedServer | None
    report: Report | None
    footprint: int | None
    waits_for: str | None
    desired_source: str
    log_path: Path
    log_bytes_dropped: int


def document(view: View) -> Document:
    """Return the document of ``GET /v1/status``."""
    return {
        **frame(view),
        "servers": [server_status(view, it) for it in view.fleet.servers.values()],
    }


def frame(view: View) -> Document:
    """Return the document without its servers."""
    return {
        "schema": SCHEMA,
        "seq": view.seq,
        "now": moment(view.wall(view.now)),
        "daemon": {
            "version": view.version,
            "pid": view.pid,
            "started_at": moment(view.wall(view.started)),
            "uptime_s": round(view.now - view.started, 3),
            "host": platform.node(),
            "platform": f"{platform.system().lower()}-{platform.machine()}",
            "state": "stopping" if view.fleet.closing else "running",
            "verdict": _verdict(view),
            "state_dir": str(view.state_dir),
            "status_endpoint": view.status_endpoint,
            "status_endpoint_error": view.status_endpoint_error,
        },
        "config": _config(view),
        "memory": machine_memory(view),
        "servers": [],
    }


def unready(fleet: Fleet, names: list[str] | None = None) -> dict[str, str]:
    """Return why servers are not ready, by name; of *names*, or of all that are meant to run."""
    if names is None:
        names = [it.name for it in fleet.servers.values() if it.desired is Desired.RUNNING]
    found = {}
    for name in names:
        server = fleet.servers.get(name)
        if server is None:
            found[name] = "no server of that name"
        elif server.state is not State.READY:
            found[name] = (
                f"{server.state}: {server.cause.message}" if server.cause else server.state
            )
    return found


def server_status(view: View, server: Server) -> ServerStatus:
    """Return the part of the document that is about *server*."""
    return tell(facts(view, server), view)


def facts(view: View, server: Server) -> Facts:
    """Return what there is to tell of *server* now."""
    report = _report(view, server)
    return Facts(
        server,
        view.prepared.get(server.name),
        report.copy() if report else None,
        footprint(view, server),
        None if server.cause else _waiting(view, server),
        view.desired_source(server.name),
        view.log_path(server.name),
        view.log_bytes_dropped(server.name),
    )


def footprint(view: View, server: Server) -> int | None:
    """Return the bytes that were last measured of the worker of *server*."""
    if server.worker is None or view.reading is None:
        return None
    return view.reading.footprints.get((server.name, server.worker.launch))


def heartbeat_age_s(server: Server, now: float) -> float | None:
    """Return for how long the worker of *server*, once it was ready, has given no sign of progress."""
    worker = server.worker
    return round(now - worker.moved_at, 3) if worker and worker.ready_at else None


def tell(known: Facts, view: View) -> ServerStatus:
    """Return the part of the document that tells *known*; *view* has the time and the clock."""
    server, report = known.server, known.report
    worker, spec, cause = server.worker, server.spec, server.cause
    host = f"[{spec.host}]" if ":" in spec.host else spec.host
    loading = worker is not None and server.state is State.LOADING
    return {
        "name": server.name,
        "aliases": list(spec.aliases),
        "labels": dict(spec.labels),
        "enabled": spec.enabled,
        "desired": server.desired,
        "desired_source": known.desired_source,
        "state": server.state,
        "state_since": moment(view.wall(server.since)),
        "reason": cause.message if cause else known.waits_for,
        "reason_code": cause.code if cause else None,
        "hint": cause.hint if cause else None,
        "health": {
            "live": server.live,
            "ready": server.state is State.READY,
            "heartbeat_age_s": heartbeat_age_s(server, view.now),
        },
        "pid": worker.pid if worker else None,
        "launch": server.launches,
        "started_at": moment(view.wall(worker.started_at)) if worker else None,
        "ready_at": moment(view.wall(worker.ready_at)) if worker and worker.ready_at else None,
        "load_s": report.ready.load_s if report and report.ready else None,
        "load_stage": worker.stage if worker and loading else None,
        "load_progress": worker.fraction if worker and loading else None,
        "restarts": {
            "total": server.restarts_total,
            "in_window": len(server.restarts),
            "max": spec.restart.max,
            "consecutive_failures": server.failures,
            "next_attempt_at": moment(view.wall(server.attempt_at))
            if server.attempt_at is not None and server.state is State.BACKOFF
            else None,
        },
        "last_exit": _last_exit(view, server.last_exit),
        "endpoint": {"host": spec.host, "port": spec.port, "url": f"http://{host}:{spec.port}"},
        "spec_hash": server.spec_hash,
        "worker_spec_hash": worker.spec_hash if worker else None,
        "log_path": str(known.log_path),
        "log_dropped_bytes": known.log_bytes_dropped,
        "model": _model(report),
        "model_requested": spec.model,
        "requests": _requests(server, report),
        "throughput": _throughput(report),
        "memory": _memory(known),
        "kv": _kv(known.prepared, report),
        "layers": _layers(report),
        "sampled_at": moment(view.wall(report.sampled_at))
        if report and report.sampled_at is not None
        else None,
    }


def open_requests(view: View, server: Server) -> OpenRequests:
    """Return the requests that the worker of *server* has open."""
    report = _report(view, server) if server.worker else None
    if report is None or report.snapshot is None or report.sampled_at is None:
        return {"sampled_at": None, "requests": []}
    return {
        "sampled_at": moment(view.wall(report.sampled_at)),
        "requests": [
            {
                "id": it.id,
                "age_s": it.age_s,
                "stream": it.stream,
                "prompt_tokens": it.prompt_tokens,
                "completion_tokens": it.completion_tokens,
            }
            for it in report.snapshot.open
        ],
    }


def _report(view: View, server: Server) -> Report | None:
    """Return what the newest worker of *server* has said, and nothing of an earlier one beside it."""
    report = view.reports.get(server.name)
    earlier = server.worker and report and report.launch != server.worker.launch
    return None if earlier else report


def moment(when: datetime) -> str:
    """Return *when* as ISO 8601 in UTC, to the millisecond."""
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def problem_status(problem: Problem) -> ProblemStatus:
    """Return *problem* as JSON."""
    return {
        "file": problem.file,
        "line": problem.line,
        "col": problem.col,
        "path": problem.path,
        "message": problem.message,
        "hint": problem.hint,
    }


def _verdict(view: View) -> Verdict:
    meant = [it for it in view.fleet.servers.values() if it.desired is Desired.RUNNING]
    if any(it.state in (State.FAILED, State.BLOCKED) for it in meant):
        return "failing"
    steady = all(it.state is State.READY for it in meant)
    in_force = view.config.state == "applied" and not diverged(view.fleet)
    return "ok" if steady and in_force else "degraded"


def in_sync(view: View) -> bool:
    """Whether what is on disk is what every server runs."""
    config = view.config
    same = config.hash_on_disk is not None and config.hash_on_disk == config.hash_applied
    return same and not diverged(view.fleet)


def _config(view: View) -> ConfigSection:
    config = view.config
    return {
        "path": str(config.path),
        "state": config.state,
        "in_sync": in_sync(view),
        "hash_on_disk": config.hash_on_disk,
        "hash_applied": config.hash_applied,
        "applied_at": _epoch(config.applied_at),
        "last_attempt_at": _epoch(config.last_attempt_at),
        "generation": config.generation,
        "reload": view.reload_mode,
        "errors": [problem_status(problem) for problem in config.problems],
        "warnings": list(config.warnings),
        "pending": [str(step) for step in config.pending],
        "divergent": _divergent(view),
    }


def _divergent(view: View) -> list[DivergentStatus]:
    return [
        {
            "server": name,
            "reason": divergence.cause.message,
            "reason_code": divergence.cause.code,
            "hint": divergence.cause.hint,
            "since": moment(view.wall(divergence.since)),
            "spec_hash": divergence.wanted.spec_hash,
        }
        for name, divergence in diverged(view.fleet).items()
    ]


def _epoch(seconds: float | None) -> str | None:
    return None if seconds is None else moment(datetime.fromtimestamp(seconds, UTC))


def _waiting(view: View, server: Server) -> str | None:
    if server.queued:
        if left := view.fleet.leftovers.get(server.name):
            return f"waiting for pid {left} of an earlier daemon to end"
        refusal = room.shortage(server, view.fleet.servers, view.fleet.budget)
        return f"waiting for memory: {refusal}" if refusal else "waiting to load"
    if server.state is State.STOPPED and not server.spec.enabled:
        return "disabled in servers.yaml"
    if server.worker is not None and server.worker.ending is not None:
        return f"{server.worker.ending}".replace("_", " ")
    return None


def _last_exit(view: View, last: LastExit | None) -> ExitStatus | None:
    if last is None:
        return None
    return {
        "launch": last.launch,
        "code": last.code,
        "at": moment(view.wall(last.at)),
        "classified": last.classified,
        "tail": list(last.tail),
    }


def _model(report: Report | None) -> ModelStatus | None:
    if report is None or report.ready is None:
        return None
    model = report.ready.model
    return {
        "id": model.id,
        "path": model.path,
        "model_type": model.model_type,
        "layers": model.layers,
        "max_context": model.max_context,
        "device": model.device,
        "mlx_version": model.mlx_version,
        "mlx_lm_version": model.mlx_lm_version,
    }


def _requests(server: Server, report: Report | None) -> Requests | None:
    if report is None or report.snapshot is None:
        return None
    now = report.snapshot
    return {
        "running": now.running if server.worker else 0,
        "waiting": now.waiting if server.worker else 0,
        "capacity": server.spec.max_concurrent,
        "total": now.requests_total,
        "errors": now.errors_total,
        "rejected": now.rejected_total,
        "cancelled": now.cancelled_total,
    }


def _throughput(report: Report | None) -> Throughput | None:
    if report is None or report.snapshot is None:
        return None
    now = report.snapshot
    return {
        "prompt_tps": now.prompt_tps,
        "decode_tps": now.decode_tps,
        "ttft_p50_s": now.ttft_p50_s,
        "ttft_p95_s": now.ttft_p95_s,
        "window_s": 60,
        "prompt_tokens_total": now.prompt_tokens_total,
        "generation_tokens_total": now.generation_tokens_total,
    }


def machine_memory(view: View) -> MachineMemory | None:
    """Return the part of the document that is about the memory of the machine; None: nobody counts it."""
    if view.machine is None or view.fleet.budget is None:
        return None
    held = sum(room.held(view.fleet.servers).values())
    workers = [it.worker for it in view.fleet.servers.values() if it.worker is not None]
    host = view.reading.host if view.reading else None
    return {
        "device": view.machine.device,
        "device_name": view.machine.device_name,
        "total_bytes": view.machine.total_bytes,
        "budget_bytes": view.fleet.budget,
        "planned_bytes": held,
        "free_bytes": max(0, view.fleet.budget - held),
        "over_budget": held > view.fleet.budget,
        "used_footprint_bytes": sum(worker.used for worker in workers),
        "available_bytes": host.available_bytes if host else None,
        "swap_used_bytes": host.swap_used_bytes if host else None,
        "wired_bytes": host.wired_bytes if host else None,
        "unattributed_wired_bytes": _unattributed(view, host.wired_bytes if host else None),
        "pressure": host.pressure if host else None,
    }


def _unattributed(view: View, wired_bytes: int | None) -> int | None:
    """Return what is wired beyond all that MLX holds in our workers."""
    if wired_bytes is None:
        return None
    reports = [
        report for it in view.fleet.servers.values() if it.worker and (report := _report(view, it))
    ]
    snapshots = [report.snapshot for report in reports if report.snapshot is not None]
    ours = sum(it.mlx_active_bytes + it.mlx_cache_bytes for it in snapshots)
    return max(0, wired_bytes - ours)


def _memory(known: Facts) -> Memory | None:
    server, report = known.server, known.report
    worker, now = server.worker, report.snapshot if report else None
    claim = worker.claim if worker and worker.claim else server.claim
    if claim is None and now is None:
        return None
    model = report.ready.model if report and report.ready else None
    return {
        "needs_bytes": claim.needs_bytes if claim else None,
        "wants_bytes": claim.wants_bytes if claim else None,
        "planned_bytes": (worker.share or None) if worker else None,
        "held_bytes": worker.held_bytes if worker else 0,
        "weights_bytes": model.weights_bytes if model else None,
        "kv_bytes": now.kv_bytes if now else None,
        "kv_reserved_bytes": now.kv_reserved_bytes if now else None,
        "kv_limit_bytes": now.kv_limit_bytes if now else None,
        "mlx_active_bytes": now.mlx_active_bytes if now else None,
        "mlx_cache_bytes": now.mlx_cache_bytes if now else None,
        "mlx_peak_bytes": now.mlx_peak_bytes if now else None,
        "process_footprint_bytes": known.footprint,
    }


def _kv(prepared: PreparedServer | None, report: Report | None) -> Kv | None:
    if prepared is None:
        return None
    asked = prepared.kv
    built = report.ready.kv if report and report.ready else None
    now = report.snapshot if report and built else None
    return {
        "requested": {
            "policy": asked.policy,
            "k": asked.k,
            "v": asked.v,
            "boundary_v": asked.boundary_v,
            "boundary_mode": asked.boundary_mode,
            "sink_tokens": asked.sink_tokens,
            "tail_tokens": asked.tail_tokens,
            "fold_tokens": asked.fold_tokens,
            "strict": asked.strict,
        },
        "summary": built.summary if built else None,
        "effective_modes": dict(built.effective) if built else None,
        "fallbacks": _fallbacks(built) if built else None,
        "warnings": list(built.warnings) if built else [],
        "calibration": built.calibration if built else None,
        "backend": built.backend if built else None,
        "packing_backend": built.packing_backend if built else None,
        "bytes_per_token": built.bytes_per_token if built else None,
        "bytes_per_token_fp16": built.bytes_per_token_fp16 if built else None,
        "compression": _compression(built) if built else None,
        "tokens_live": now.kv_tokens if now else None,
        "bytes_live": now.kv_bytes if now else None,
    }


def _fallbacks(built: KvReport) -> list[Fallback]:
    return [
        {"layers": [layer.first, layer.last], "mode": layer.effective, "reason": layer.reason}
        for layer in built.layers
        if layer.effective != layer.requested
    ]


def _compression(built: KvReport) -> float | None:
    """Return how many times smaller a token is than in a 16-bit cache; None where nothing grows."""
    if not built.bytes_per_token:
        return None
    return round(built.bytes_per_token_fp16 / built.bytes_per_token, 3)


def _layers(report: Report | None) -> list[LayerGroup] | None:
    if report is None or report.ready is None:
        return None
    return [
        {
            "first": layer.first,
            "last": layer.last,
            "kind": layer.kind,
            "requested": layer.requested,
            "effective": layer.effective,
            "reason": layer.reason,
            "backend": layer.backend,
            "backend_reason": layer.backend_reason,
            "packing_backend": layer.packing_backend,
            "packing_reason": layer.packing_reason,
        }
        for layer in report.ready.kv.layers
    ]
