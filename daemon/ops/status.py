"""The status document: everything an operator asks about, from what the supervisor already knows.

Building it asks nobody anything: a hung worker cannot hang it, and each worker's numbers say when they
were sampled.
"""

from __future__ import annotations

import platform
from datetime import UTC, datetime

from daemon.ops.document import (
    SCHEMA,
    ConfigSection,
    DivergentStatus,
    Document,
    Verdict,
    moment,
    problem_status,
)
from daemon.ops.memory_status import machine_memory
from daemon.ops.server_status import server_status
from daemon.ops.view import View, in_sync
from daemon.supervisor.plan import Fleet, diverged
from daemon.supervisor.server import Desired, State


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
            "mlx_version": view.mlx_version,
            "backend": view.backend,
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


def _verdict(view: View) -> Verdict:
    meant = [it for it in view.fleet.servers.values() if it.desired is Desired.RUNNING]
    if any(it.state in (State.FAILED, State.BLOCKED) for it in meant):
        return "failing"
    steady = all(it.state is State.READY for it in meant)
    in_force = view.config.state == "applied" and not diverged(view.fleet)
    return "ok" if steady and in_force else "degraded"


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
