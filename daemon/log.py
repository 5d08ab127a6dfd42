"""Structured logging: one set-up for every process, and the list of event names.

An event is a constant name, ``subject.past_participle``. Values go in fields with units
(``ttft_ms=``, ``kv_bytes=``). Prompts, generated text and keys are never logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO, cast

import structlog

LogFormat = Literal["auto", "console", "json"]
Level = Literal["debug", "info", "warning", "error"]

EVENTS = frozenset({
    # daemon
    "daemon.started", "daemon.stopping", "daemon.stopped", "status.unavailable", "control.failed",
    # configuration
    "config.loaded", "config.rejected", "config.unchanged", "config.pending", "config.stale", "config.not_saved", "config.failed", "state.not_written",
    "plan.applied", "server.updated", "server.rolled_back", "watch.unavailable",
    # workers, as the supervisor sees them
    "worker.started", "worker.loading", "worker.ready", "worker.degraded", "worker.draining", "worker.drain_timed_out",
    "worker.signalled", "worker.killed", "worker.exited", "worker.backed_off", "worker.failed", "worker.blocked",
    "worker.stopped", "blas.missing", "device.unknown", "memory.over_budget", "worker.leftover_found", "worker.leftover_ended", "worker.protocol_failed",
    # inside a worker
    "model.loading", "model.loaded", "policy.resolved", "policy.warned", "engine.started", "engine.failed", "engine.stopped",
    "request.finished", "request.rejected", "request.failed", "http.failed", "lease.lost",
})  # fmt: skip


def configure(
    *, level: Level = "info", fmt: LogFormat = "auto", stream: TextIO | None = None
) -> None:
    """Set up structlog for this process; call once, first thing.

    *fmt* ``auto`` writes for people on a terminal and JSON lines elsewhere.
    """
    out = stream or sys.stderr
    console = fmt == "console" or (fmt == "auto" and out.isatty())
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


def get_logger(**fields: object) -> structlog.typing.FilteringBoundLogger:
    """Return a logger that adds *fields* to every line."""
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(**fields))
