"""What `tqd check` found out, as one document: the table and the JSON say the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from daemon.config.machine import budget_bytes
from daemon.config.prepare import Prepared, PreparedServer
from daemon.policy.budget import Fit
from daemon.policy.resolve import LayerGroup

State = Literal["ok", "disabled", "unresolved", "no weights", "blocked"]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server; sizes in bytes, None where the model or its weights are not on this machine."""

    name: str
    state: State
    reason: str | None
    hint: str | None
    model: str
    endpoint: str
    policy: str
    summary: str | None
    layers: tuple[LayerGroup, ...]
    allowlist: str | None
    max_context: int | None
    max_concurrent: int
    bytes_per_token: float | None
    bytes_per_token_fp16: float | None
    compression: float | None
    kv_bytes: int | None
    weights_bytes: int | None
    minimum_bytes: int | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All enabled servers together, in bytes.

    *needed_bytes* has every server at `max_concurrent` sequences of `max_context` tokens, *minimum_bytes*
    at one such sequence. *unknown* are the servers that count nothing or their KV cache only.
    """

    machine_bytes: int
    budget_bytes: int
    weights_bytes: int
    kv_bytes: int
    needed_bytes: int
    minimum_bytes: int
    fits: Literal["yes", "not all at once", "no"]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole answer; *ok* is what the exit code says."""

    config: str
    servers: tuple[ServerReport, ...]
    memory: MemoryReport
    warnings: tuple[str, ...]
    ok: bool

    def document(self) -> dict[str, Any]:
        """Return the report as JSON holds it."""
        return {**asdict(self), "problems": []}


def report(prepared: Prepared) -> Report:
    """Return what *prepared* means for the one who wrote it."""
    servers = tuple(_server(server) for server in prepared.servers.values())
    memory = _memory(prepared)
    return Report(
        config=str(prepared.path),
        servers=servers,
        memory=memory,
        warnings=tuple(map(str, prepared.warnings)),
        ok=memory.fits != "no" and not any(s.state in ("unresolved", "blocked") for s in servers),
    )


def _server(server: PreparedServer) -> ServerReport:
    cost, blocked, resolved = server.cost, server.blocked, server.resolved
    host = f"[{server.spec.host}]" if ":" in server.spec.host else server.spec.host
    return ServerReport(
        name=server.name,
        state=_state(server),
        reason=blocked.message if blocked else None,
        hint=blocked.hint if blocked else None,
        model=server.model,
        endpoint=f"{host}:{server.spec.port}",
        policy=server.kv.policy,
        summary=resolved.summary if resolved else None,
        layers=resolved.groups() if resolved else (),
        allowlist=server.allowed,
        max_context=server.max_context,
        max_concurrent=server.spec.max_concurrent,
        bytes_per_token=cost.bytes_per_token if cost else None,
        bytes_per_token_fp16=cost.bytes_per_token_fp16 if cost else None,
        compression=cost.compression if cost else None,
        kv_bytes=server.kv_bytes,
        weights_bytes=server.weights_bytes,
        minimum_bytes=server.minimum_bytes,
        warnings=server.warnings,
    )


def _state(server: PreparedServer) -> State:
    if not server.spec.enabled:
        return "disabled"
    if server.resolved is None:
        return "unresolved"
    if server.weights_bytes is None:
        return "no weights"  # a plan needs config.json only: no fault, but nothing to start either
    return "blocked" if server.blocked else "ok"


def _memory(prepared: Prepared) -> MemoryReport:
    enabled = [server for server in prepared.servers.values() if server.spec.enabled]
    budget = budget_bytes(prepared.memory_bytes)
    everything = Fit(
        weights_bytes=sum(server.weights_bytes or 0 for server in enabled),
        kv_bytes=sum(server.kv_bytes or 0 for server in enabled),
        memory_bytes=budget,
    )
    minimum = sum(server.minimum_bytes or 0 for server in enabled)
    return MemoryReport(
        machine_bytes=prepared.memory_bytes,
        budget_bytes=budget,
        weights_bytes=everything.weights_bytes,
        kv_bytes=everything.kv_bytes,
        needed_bytes=everything.needed_bytes,
        minimum_bytes=minimum,
        fits="yes" if everything.fits else "not all at once" if minimum <= budget else "no",
        unknown=tuple(server.name for server in enabled if server.weights_bytes is None),
    )
