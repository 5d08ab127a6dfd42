"""What all that operators are told is made of: what the supervisor knows at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from daemon.config.machine import Machine
from daemon.config.prepare import PreparedServer
from daemon.supervisor.conclusions import ConfigStatus
from daemon.supervisor.counts import Counts
from daemon.supervisor.gauge import Reading
from daemon.supervisor.plan import Fleet, diverged
from daemon.supervisor.server import Server
from daemon.supervisor.workers import Report


@dataclass(frozen=True)
class View:
    """What is known. *wall* turns a time of the supervisor's clock into a moment."""

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


def newest_report(view: View, server: Server) -> Report | None:
    """Return what the newest worker of *server* has said, and nothing of an earlier one beside it."""
    report = view.reports.get(server.name)
    earlier = server.worker and report and report.launch != server.worker.launch
    return None if earlier else report


def footprint(view: View, server: Server) -> int | None:
    """Return the bytes that were last measured of the worker of *server*."""
    if server.worker is None or view.reading is None:
        return None
    return view.reading.footprints.get((server.name, server.worker.launch))


def in_sync(view: View) -> bool:
    """Whether what is on disk is what every server runs."""
    config = view.config
    same = config.hash_on_disk is not None and config.hash_on_disk == config.hash_applied
    return same and not diverged(view.fleet)
