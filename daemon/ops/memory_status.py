"""The memory sections of the status document: of the machine, and of each server."""

from __future__ import annotations

from daemon.ops.document import MachineMemory, Memory
from daemon.ops.view import View, newest_report
from daemon.supervisor import room
from daemon.supervisor.server import Server
from daemon.supervisor.workers import Report


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
        report
        for it in view.fleet.servers.values()
        if it.worker and (report := newest_report(view, it))
    ]
    snapshots = [report.snapshot for report in reports if report.snapshot is not None]
    ours = sum(it.mlx_active_bytes + it.mlx_cache_bytes for it in snapshots)
    return max(0, wired_bytes - ours)


def server_memory(
    server: Server, report: Report | None, footprint_bytes: int | None
) -> Memory | None:
    """Return the part of the document that is about the memory of *server*; None: nothing is known."""
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
        "process_footprint_bytes": footprint_bytes,
    }
