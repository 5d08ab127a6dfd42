"""The daemon's metrics page: its own series, those of every server, and those that workers push.

It is made of what the supervisor knows: no worker is asked, so none can hold it up, and what is said
about a server stays when its worker is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from daemon.metrics import worker as worker_series
from daemon.metrics.exposition import Page
from daemon.ops.memory_status import machine_memory
from daemon.ops.view import View, footprint, in_sync
from daemon.supervisor.counts import RestartReason
from daemon.supervisor.server import Desired, Server, State

FRESH_S = 5.0  # a worker pushes its numbers each second


def metrics(view: View, page: Page) -> Iterator[None]:
    """Fill *page* with what ``GET /metrics`` answers; whoever iterates may do something else after each server."""
    _add_daemon(page, view)
    for server in view.fleet.servers.values():
        _add_server(page, view, server)
        _add_worker(page, view, server)
        yield


def _add_daemon(page: Page, view: View) -> None:
    page.add("tqd_build_info", 1, version=view.version, mlx=view.mlx_version, backend=view.backend)
    page.add("tqd_start_time_seconds", view.wall(view.started).timestamp())
    config, reloads = view.config, view.config.reloads
    accepted = config.state not in ("rejected", "stale")
    page.add("tqd_config_last_reload_successful", accepted)
    at = reloads.succeeded_at or config.applied_at
    if at is not None:
        page.add("tqd_config_last_reload_success_timestamp_seconds", at)
    page.add("tqd_config_reloads_total", reloads.applied, result="applied")
    page.add("tqd_config_reloads_total", reloads.rejected, result="rejected")
    page.add("tqd_config_reloads_total", reloads.noop, result="noop")
    page.add("tqd_config_in_sync", in_sync(view))
    page.add("tqd_config_generation", config.generation)
    memory = machine_memory(view)
    if memory is not None:
        page.add("tqd_memory_budget_bytes", memory["budget_bytes"])
        page.add("tqd_memory_planned_bytes", memory["planned_bytes"])
        if memory["available_bytes"] is not None:
            page.add("tqd_memory_available_bytes", memory["available_bytes"])
    for reason, count in view.counts.refused_for_memory.items():
        page.add("tqd_admission_rejections_total", count, reason=reason)


def _add_server(page: Page, view: View, server: Server) -> None:
    name, worker, counts = server.name, server.worker, view.counts.of(server.name)
    page.add("tqd_server_info", 1, server=name, model=server.spec.model)
    page.add("tqd_server_up", server.live, server=name)
    page.add("tqd_server_ready", server.state is State.READY, server=name)
    for state in State:
        page.add("tqd_server_state", server.state is state, server=name, state=state)
    page.add("tqd_server_desired_running", server.desired is Desired.RUNNING, server=name)
    for reason in get_args(RestartReason):
        page.add("tqd_server_restarts_total", counts.restarts[reason], server=name, reason=reason)
    waiting = server.state is State.BACKOFF and server.attempt_at is not None
    left_s = max(server.attempt_at - view.now, 0.0) if waiting and server.attempt_at else 0.0
    page.add("tqd_server_backoff_seconds", left_s, server=name)
    if worker is not None:
        started = view.wall(worker.started_at).timestamp()
        page.add("tqd_server_start_time_seconds", started, server=name)
    page.add_histogram("tqd_server_load_duration_seconds", counts.load_s.read(), server=name)
    last = server.last_exit
    if last is not None and last.code is not None:
        page.add("tqd_server_last_exit_code", last.code, server=name)
    if (used := footprint(view, server)) is not None:
        page.add("tqd_server_process_footprint_bytes", used, server=name)
    page.add("tqd_server_probe_failures_total", counts.probe_failures, server=name)
    page.add("tqd_server_log_bytes_dropped_total", view.log_bytes_dropped(name), server=name)


def _add_worker(page: Page, view: View, server: Server) -> None:
    name, worker, report = server.name, server.worker, view.reports.get(server.name)
    alive = worker is not None and report is not None and report.launch == worker.launch
    sampled_at = report.sampled_at if report is not None and alive else None
    fresh = sampled_at is not None and view.now - sampled_at <= FRESH_S
    page.add("tqd_worker_scrape_up", fresh, server=name)
    if report is None:
        return
    if report.counted is not None:
        worker_series.add_counters(page, report.counted, server=name)
    if report.requests is not None:
        worker_series.add_requests(page, report.requests, server=name)
    if alive and report.snapshot is not None:
        worker_series.add_gauges(page, report.snapshot, server=name)
    if alive and report.ready is not None:
        worker_series.add_kv(page, report.ready.kv, server=name)
