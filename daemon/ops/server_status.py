"""The part of the status document that is about one server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from daemon.config.prepare import PreparedServer
from daemon.ops.document import (
    ExitStatus,
    ModelStatus,
    OpenRequests,
    Requests,
    ServerStatus,
    Throughput,
    moment,
)
from daemon.ops.kv_status import kv, layers
from daemon.ops.memory_status import server_memory
from daemon.ops.view import View, footprint, newest_report
from daemon.supervisor import room
from daemon.supervisor.server import LastExit, Server, State
from daemon.supervisor.workers import Report


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


def server_status(view: View, server: Server) -> ServerStatus:
    """Return the part of the document that is about *server*."""
    return tell(facts(view, server), view)


def facts(view: View, server: Server) -> Facts:
    """Return what there is to tell of *server* now."""
    report = newest_report(view, server)
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
        "memory": server_memory(server, report, known.footprint),
        "kv": kv(known.prepared, report),
        "layers": layers(report),
        "sampled_at": moment(view.wall(report.sampled_at))
        if report and report.sampled_at is not None
        else None,
    }


def open_requests(view: View, server: Server) -> OpenRequests:
    """Return the requests that the worker of *server* has open."""
    report = newest_report(view, server) if server.worker else None
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
