"""The status document as people read it on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from daemon.cli.tables import ratio
from daemon.cli.waiting import RETRY_HINT, failure, place, reason, rolled_back
from daemon.ops.document import ConfigSection, Document, MachineMemory, Memory, ServerStatus
from daemon.units import format_size

_STYLES = {
    "ready": "green",
    "starting": "cyan",
    "loading": "cyan",
    "draining": "cyan",
    "stopping": "cyan",
    "degraded": "yellow",
    "backoff": "yellow",
    "blocked": "red",
    "failed": "red",
    "stopped": "dim",
}


def overview(document: Document) -> RenderableType:
    """Return every server as a row, and below it whatever needs attention."""
    return Group(*_overview(document))


def _overview(document: Document) -> Iterator[RenderableType]:
    now = datetime.fromisoformat(document["now"])
    yield _table(document["servers"], now)
    for server in document["servers"]:
        if server["state"] in ("failed", "blocked", "backoff"):
            yield Text(f"\n{reason(server)}", style=_STYLES[server["state"]])
            hint = server["hint"] or f"`tqd logs {server['name']}` shows what it wrote"
            yield _hint(hint)
    if memory := document["memory"]:
        yield _machine(memory)
    yield from _notes(document)


def _hint(hint: str) -> Text:
    return Text(f"  hint: {hint}", style="dim")


def detail(server: ServerStatus, document: Document) -> RenderableType:
    """Return everything about one server."""
    now = datetime.fromisoformat(document["now"])
    return Group(_table([server], now), *_facts(server), *_layers(server))


def _table(servers: list[ServerStatus], now: datetime) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NAME", "STATE", "SINCE", "PID", "RESTARTS", "ENDPOINT", "KV CACHE", "B/TOKEN"):
        right = name in ("PID", "RESTARTS", "B/TOKEN")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "KV CACHE")
    table.add_column("REQUESTS", no_wrap=True)
    for server in servers:
        table.add_row(*_row(server, now))
    return table


def _row(server: ServerStatus, now: datetime) -> Iterator[RenderableType]:
    kv = server["kv"]
    requests = server["requests"]
    yield Text(server["name"])
    yield Text(_state(server), style=_STYLES[server["state"]])
    yield Text(_age(now, server["state_since"]))
    yield Text(str(server["pid"] or ""))
    yield Text(str(server["restarts"]["total"]))
    yield Text(server["endpoint"]["url"])
    yield Text((kv and kv["summary"]) or "")
    yield Text(f"{kv['bytes_per_token']:,.0f}" if kv and kv["bytes_per_token"] is not None else "")
    if requests is None:
        yield Text("")
    else:
        yield Text(f"{requests['running']} running, {requests['waiting']} waiting")


def _state(server: ServerStatus) -> str:
    progress = server["load_progress"]
    if progress is not None:
        return f"{server['state']} {progress:.0%}"
    if server["reason"] and server["state"] in ("starting", "stopped", "degraded"):
        return f"{server['state']} ({server['reason']})"
    return server["state"]


def _notes(document: Document) -> Iterator[RenderableType]:
    config, daemon = document["config"], document["daemon"]
    yield from _config_notes(config)
    if daemon["status_endpoint_error"]:
        yield Text(f"\nno status endpoint: {daemon['status_endpoint_error']}", style="yellow")
    if daemon["state"] == "stopping":
        yield Text("\nthe daemon is shutting down", style="yellow")


def _config_notes(config: ConfigSection) -> Iterator[RenderableType]:
    match config["state"]:
        case "rejected":
            yield Text(f"\n{config['path']} was rejected; what runs is unchanged", style="red")
            yield _hint("it is read again when it is saved, or with `tqd reload`")
        case "stale":
            yield Text(
                f"\n{config['path']} is broken; the last good configuration runs", style="red"
            )
        case "pending":
            yield Text(f"\n{config['path']} has changes that `tqd reload` applies:", style="yellow")
        case _:
            pass
    for divergent in config["divergent"]:
        yield Text(f"\n{rolled_back(divergent)}", style="red")
        yield _hint(RETRY_HINT.format(divergent["server"]))
    for warning in config["warnings"]:
        yield Text(f"\nnote: {warning}", style="yellow")
    for step in config["pending"]:
        yield Text(f"  {step}")
    for problem in config["errors"]:
        where = f"{problem['path']}: " if problem["path"] else ""
        yield Text(f"  {place(problem)}: {where}{problem['message']}")
        if problem["hint"]:
            yield Text(f"    hint: {problem['hint']}", style="dim")


def _facts(server: ServerStatus) -> Iterator[RenderableType]:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _fact_rows(server):
        table.add_row(Text(name, style="dim"), Text(value))
    yield Text("")
    yield table
    if server["state"] in ("failed", "blocked", "backoff"):
        yield Text(f"\n{failure(server)}", style=_STYLES[server["state"]])
        if server["hint"]:
            yield _hint(server["hint"])


def _fact_rows(server: ServerStatus) -> Iterator[tuple[str, str]]:
    yield "desired", f"{server['desired']} (by {server['desired_source']})"
    model = server["model"]
    yield "model", f"{model['id']} ({model['device']})" if model else server["model_requested"]
    if server["load_s"] is not None:
        yield "load", f"{server['load_s']:.1f} s"
    if memory := server["memory"]:
        yield from _memory_rows(memory)
    if speed := server["throughput"]:
        yield "tokens/s", f"prompt {speed['prompt_tps']:.1f}, decode {speed['decode_tps']:.1f}"
    lost = server["log_dropped_bytes"]
    yield (
        "log",
        server["log_path"] + (f" ({format_size(lost)} could not be written)" if lost else ""),
    )


def _memory_rows(memory: Memory) -> Iterator[tuple[str, str]]:
    plan = {
        "planned": memory["planned_bytes"],
        "needs": memory["needs_bytes"],
        "could use": memory["wants_bytes"],
    }
    yield "memory plan", _sizes(plan)
    use = {
        "process": memory["process_footprint_bytes"],
        "weights": memory["weights_bytes"],
        "KV cache": memory["kv_bytes"],
        "reserved for running requests": memory["kv_reserved_bytes"],
        "MLX active": memory["mlx_active_bytes"],
        "MLX cache": memory["mlx_cache_bytes"],
        "MLX peak": memory["mlx_peak_bytes"],
    }
    if sizes := _sizes(use):
        yield "memory used", sizes


def _sizes(sizes: Mapping[str, int | None]) -> str:
    return ", ".join(
        f"{name} {format_size(size)}" for name, size in sizes.items() if size is not None
    )


def _machine(memory: MachineMemory) -> Text:
    text = (
        f"\nmemory: {format_size(memory['planned_bytes'])} of {format_size(memory['budget_bytes'])} planned"
        f" for servers ({format_size(memory['total_bytes'])} {memory['device']})"
    )
    if memory["over_budget"]:
        text += ": over budget; what runs goes on, nothing new starts"
    if short := memory["pressure"] in ("warn", "critical"):
        text += f"; the machine is short of memory ({memory['pressure']})"
    return Text(text, style="red" if memory["over_budget"] else "yellow" if short else "dim")


def _layers(server: ServerStatus) -> Iterator[RenderableType]:
    kv, layers = server["kv"], server["layers"]
    if kv is None or layers is None:
        return
    cost = f"{kv['bytes_per_token']:,.0f} bytes per token"
    if kv["compression"] is not None:
        cost += f", {ratio(kv['compression'])} at 16 bits"
    yield Text(f"\nKV cache: {kv['summary']}; {cost}")
    yield Text(f"calibration: {kv['calibration']}")
    for warning in kv["warnings"]:
        yield Text(f"note: {warning}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("LAYERS", "KIND", "REQUESTED", "EFFECTIVE", "ATTENTION", "PACKING", "REASON"):
        table.add_column(name)
    for group in layers:
        first, last = group["first"], group["last"]
        span = str(first) if first == last else f"{first}-{last}"
        found = (group["reason"], group["backend_reason"], group["packing_reason"])
        reasons = "; ".join(dict.fromkeys(filter(None, found)))
        backends = (group["backend"], group["packing_backend"])
        row = (span, group["kind"], group["requested"], group["effective"], *backends, reasons)
        table.add_row(*map(Text, row))
    yield table


def _age(now: datetime, since: str) -> str:
    seconds = max(int((now - datetime.fromisoformat(since).astimezone(UTC)).total_seconds()), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
