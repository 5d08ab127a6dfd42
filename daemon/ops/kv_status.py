"""The KV sections of the status document: the policy as requested, as built, and layer by layer."""

from __future__ import annotations

from daemon.config.prepare import PreparedServer
from daemon.config.wire import KvReport
from daemon.ops.document import Fallback, Kv, LayerGroup
from daemon.supervisor.workers import Report


def kv(prepared: PreparedServer | None, report: Report | None) -> Kv | None:
    """Return what was requested, and what the worker built and measured; None: nothing is known."""
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


def layers(report: Report | None) -> list[LayerGroup] | None:
    """Return what each layer got, as the worker's probe found it; None: no worker has said."""
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
