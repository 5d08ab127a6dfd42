"""Every metric that tqd exports: name, type, labels and meaning, in one table.

Names and labels are part of the public surface. A worker exports its own families without the label
`server`, the daemon all of them, those of workers and servers with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["gauge", "counter", "histogram"]
Source = Literal["daemon", "server", "worker"]

# Upper bounds in seconds. A prompt may wait and be read for minutes; a model may load for as long.
REQUEST_S: Final = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
TOKEN_S: Final = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0,
)  # fmt: skip
LOAD_S: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. *labels* come after `server`, which those of servers and workers have in the daemon."""

    name: str
    kind: Kind
    source: Source
    meaning: str
    labels: tuple[str, ...] = ()


def _daemon(name: str, kind: Kind, meaning: str, *labels: str) -> Family:
    return Family(f"tqd_{name}", kind, "daemon", meaning, labels)


def _server(name: str, kind: Kind, meaning: str, *labels: str) -> Family:
    return Family(f"tqd_{name}", kind, "server", meaning, labels)


def _worker(name: str, kind: Kind, meaning: str, *labels: str) -> Family:
    return Family(f"tqd_{name}", kind, "worker", meaning, labels)


_ALL = (
    _daemon("build_info", "gauge", "1; the versions of tqd and MLX, and what workers compute on: metal, cuda or cpu.", "version", "mlx", "backend"),
    _daemon("start_time_seconds", "gauge", "When the daemon started, in seconds since the epoch."),
    _daemon("config_last_reload_successful", "gauge", "1 if the last reading of servers.yaml was accepted, 0 if it was rejected."),
    _daemon("config_last_reload_success_timestamp_seconds", "gauge", "When servers.yaml was last accepted, in seconds since the epoch."),
    _daemon("config_reloads_total", "counter", "Readings of servers.yaml since the start: applied, rejected, or noop where nothing had changed.", "result"),
    _daemon("config_in_sync", "gauge", "1 if what is on disk is what is in force."),
    _daemon("config_generation", "gauge", "Number of the configuration in force; grows with each edit applied."),
    _daemon("memory_budget_bytes", "gauge", "Memory that servers may plan with."),
    _daemon("memory_planned_bytes", "gauge", "Memory that the plans of all running servers take."),
    _daemon("memory_available_bytes", "gauge", "Memory that the system could give out now."),
    _daemon("admission_rejections_total", "counter", "Starts refused because of memory.", "reason"),
    _server("server_info", "gauge", "1; the model that the server names.", "model"),
    _server("server_up", "gauge", "1 if there is a worker that speaks."),
    _server("server_ready", "gauge", "1 if the server takes requests."),
    _server("server_state", "gauge", "1 for the state that the server is in, 0 for the others.", "state"),
    _server("server_desired_running", "gauge", "1 if the server is meant to run."),
    _server("server_restarts_total", "counter", "Workers that were followed by another one: after a crash, a kill from outside (oom), a failed probe, an edit (config) or `tqd restart` (manual).", "reason"),
    _server("server_backoff_seconds", "gauge", "Seconds until the next attempt of a server in backoff; else 0."),
    _server("server_start_time_seconds", "gauge", "When the worker was started, in seconds since the epoch."),
    _server("server_load_duration_seconds", "histogram", "Seconds from the start of a worker to ready."),
    _server("server_last_exit_code", "gauge", "Exit code of the last worker that ended; negative: the signal."),
    _server("server_process_footprint_bytes", "gauge", "Memory of the worker's process, as the system counts it."),
    _server("server_probe_failures_total", "counter", "Times that a worker said nothing, or did not move on, for longer than its probe allows."),
    _server("server_log_bytes_dropped_total", "counter", "Output of workers that did not reach the log because the disk was slow or full."),
    _server("worker_scrape_up", "gauge", "1 if the worker's numbers are at most 8 seconds old: workers push them each second, those at rest every five."),
    _worker("requests_running", "gauge", "Sequences that are read or generated now."),
    _worker("requests_waiting", "gauge", "Sequences that wait for a place."),
    _worker("requests_total", "counter", "HTTP requests answered; code 499: the client left before the end.", "endpoint", "code"),
    _worker("request_duration_seconds", "histogram", "From a request for generation to the end of its answer, where that is complete."),
    _worker("time_to_first_token_seconds", "histogram", "From a request for generation to its first token."),
    _worker("time_per_output_token_seconds", "histogram", "Mean time between the tokens of a sequence after its first ones."),
    _worker("queue_time_seconds", "histogram", "From the arrival of a sequence at the engine to the first work on it."),
    _worker("prompt_tokens_total", "counter", "Prompt tokens read."),
    _worker("generation_tokens_total", "counter", "Tokens generated."),
    _worker("generation_loop_heartbeat_timestamp_seconds", "gauge", "When the engine's loop last passed, idle passes included, in seconds since the epoch."),
    _worker("mlx_memory_bytes", "gauge", "MLX's memory: active arrays, cache of freed buffers, peak of active.", "kind"),
    _worker("kv_cache_bytes", "gauge", "KV cache that live sequences have allocated."),
    _worker("kv_cache_budget_bytes", "gauge", "Memory that KV caches of this server may take."),
    _worker("kv_cache_usage_ratio", "gauge", "kv_cache_bytes over kv_cache_budget_bytes."),
    _worker("kv_cache_tokens", "gauge", "Tokens that live sequences hold."),
    _worker("kv_layers", "gauge", "Layers by the scheme that they really have.", "mode"),
    _worker("kv_quantize_seconds_total", "counter", "Time spent packing keys and values, estimated: now and then a fold is timed, and others count like it."),
    _worker("attention_layers", "gauge", "Layers by the attention that runs: metal, cuda, cpu, reference, or mlx where nothing is packed.", "backend"),
    _worker("packing_layers", "gauge", "Layers by what packs their tokens: metal, cuda, reference, or mlx where nothing is packed.", "backend"),
    _worker("kernel_fallback_layers", "gauge", "Layers in which the reference stands in for the device's own kernels, by reason.", "reason"),
    _worker("kv_fallback_layers", "gauge", "Layers whose scheme is not the requested one, by reason.", "reason"),
)  # fmt: skip

FAMILIES: Final = {family.name: family for family in _ALL}
