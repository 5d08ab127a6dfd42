"""The series of one worker, made of what it last reported: its own page and the daemon's agree."""

from __future__ import annotations

from collections import Counter

from daemon.config.wire import KvReport, RequestCounts, Snapshot
from daemon.metrics.exposition import Page

_MOST_REASON = 120  # characters; a reason may quote what a model's code raised


def add_counters(page: Page, now: Snapshot, **labels: str) -> None:
    """Add the counters of *now*; they mean something after the worker's end too."""
    page.add("tqd_prompt_tokens_total", now.prompt_tokens_total, **labels)
    page.add("tqd_generation_tokens_total", now.generation_tokens_total, **labels)
    if now.kv_packing_s is not None:
        page.add("tqd_kv_quantize_seconds_total", now.kv_packing_s, **labels)


def add_requests(page: Page, counts: RequestCounts, **labels: str) -> None:
    """Add the counters and histograms of requests; they stay after the worker's end too."""
    for endpoint, codes in counts.answered.items():
        for code, count in codes.items():
            page.add("tqd_requests_total", count, endpoint=endpoint, code=code, **labels)
    page.add_histogram("tqd_request_duration_seconds", counts.duration_s, **labels)
    page.add_histogram("tqd_time_to_first_token_seconds", counts.ttft_s, **labels)
    page.add_histogram("tqd_time_per_output_token_seconds", counts.tpot_s, **labels)
    if counts.queue_time_s is not None:
        page.add_histogram("tqd_queue_time_seconds", counts.queue_time_s, **labels)


def add_gauges(page: Page, now: Snapshot, **labels: str) -> None:
    """Add what is true of a living worker only."""
    page.add("tqd_requests_running", now.running, **labels)
    page.add("tqd_requests_waiting", now.waiting, **labels)
    if now.passed_at is not None:
        page.add("tqd_generation_loop_heartbeat_timestamp_seconds", now.passed_at, **labels)
    memory = {
        "active": now.mlx_active_bytes,
        "cache": now.mlx_cache_bytes,
        "peak": now.mlx_peak_bytes,
    }
    for kind, count in memory.items():
        page.add("tqd_mlx_memory_bytes", count, kind=kind, **labels)
    page.add("tqd_kv_cache_bytes", now.kv_bytes, **labels)
    page.add("tqd_kv_cache_tokens", now.kv_tokens, **labels)
    if now.kv_limit_bytes:
        page.add("tqd_kv_cache_budget_bytes", now.kv_limit_bytes, **labels)
        page.add("tqd_kv_cache_usage_ratio", now.kv_bytes / now.kv_limit_bytes, **labels)


def add_kv(page: Page, kv: KvReport, **labels: str) -> None:
    """Add how many layers have which scheme, why it is not the requested one, and what attends to them and packs."""
    for mode, layers in kv.effective.items():
        page.add("tqd_kv_layers", layers, mode=mode, **labels)
    fallbacks: Counter[str] = Counter()
    attending: Counter[str] = Counter()
    packing: Counter[str] = Counter()
    replaced: Counter[str] = Counter()
    for group in kv.layers:
        layers = group.last - group.first + 1
        attending[group.backend] += layers
        packing[group.packing_backend] += layers
        if group.effective != group.requested:
            fallbacks[_label(group.reason)] += layers
        for reason in dict.fromkeys(filter(None, (group.backend_reason, group.packing_reason))):
            replaced[_label(reason)] += layers
    for reason, layers in fallbacks.items():
        page.add("tqd_kv_fallback_layers", layers, reason=reason, **labels)
    for backend, layers in attending.items():
        page.add("tqd_attention_layers", layers, backend=backend, **labels)
    for backend, layers in packing.items():
        page.add("tqd_packing_layers", layers, backend=backend, **labels)
    for reason, layers in replaced.items():
        page.add("tqd_kernel_fallback_layers", layers, reason=reason, **labels)


def _label(reason: str | None) -> str:
    return (reason or "")[:_MOST_REASON]
