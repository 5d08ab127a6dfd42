"""What `tqd check` found out, as one document: the table and the JSON say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from daemon.cli.ports import Ports
from daemon.config.prepare import Prepared, PreparedServer
from daemon.errors import TqdError
from daemon.policy.claim import Claim
from daemon.policy.resolved import LayerGroup
from daemon.supervisor import memory

State = Literal["ok", "disabled", "unresolved", "no weights", "blocked"]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server; sizes in bytes, None where the model or its weights are not on this machine.

    *share_bytes* is what it would get if every enabled server ran; None: it would not start then.
    """

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
    claim: Claim | None
    needs_bytes: int | None
    share_bytes: int | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All enabled servers together, in bytes.

    *needs_bytes* are the weights, the process, scratch memory and one sequence of `max_context` tokens of
    each; *wants_bytes* have `max_concurrent` sequences. *unknown* are the servers that count nothing.
    """

    device: str
    machine_bytes: int
    budget_bytes: int
    weights_bytes: int
    kv_bytes: int
    needs_bytes: int
    wants_bytes: int
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


def report(prepared: Prepared, ports: Ports) -> Report:
    """Return what *prepared* means for the one who wrote it, with *ports* as they are now."""
    claims = {
        server.name: server.claim
        for server in prepared.servers.values()
        if server.spec.enabled and server.claim is not None
    }
    refused = memory.admit_in_turn(prepared.budget_bytes, claims.items(), {})
    fitting = {name: claim for name, claim in claims.items() if name not in refused}
    shares = memory.divide(prepared.budget_bytes, fitting)
    servers = tuple(
        _server(server, shares.get(name), ports.servers.get(name))
        for name, server in prepared.servers.items()
    )
    together = _memory(prepared, claims)
    return Report(
        config=str(prepared.path),
        servers=servers,
        memory=together,
        warnings=(*map(str, prepared.warnings), *_endpoint(prepared, ports)),
        ok=together.fits != "no" and not any(s.state in ("unresolved", "blocked") for s in servers),
    )


def _endpoint(prepared: Prepared, ports: Ports) -> Iterator[str]:
    if (taken := ports.endpoint) is not None:
        without = f"{taken.message}: the daemon would run without its ops endpoint"
        yield str(prepared.daemon_source.problem("status", without, taken.hint))


def _server(
    server: PreparedServer, share_bytes: int | None, taken: TqdError | None
) -> ServerReport:
    cost, resolved = server.cost, server.resolved
    faults = [it for it in (server.blocked, taken) if it is not None]
    host = f"[{server.spec.host}]" if ":" in server.spec.host else server.spec.host
    return ServerReport(
        name=server.name,
        state=_state(server, taken),
        reason="; ".join(it.message for it in faults) or None,
        hint="; ".join(it.hint for it in faults if it.hint) or None,
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
        claim=server.claim,
        needs_bytes=server.claim.needs_bytes if server.claim else None,
        share_bytes=share_bytes,
        warnings=server.warnings,
    )


def _state(server: PreparedServer, taken: TqdError | None) -> State:
    if not server.spec.enabled:
        return "disabled"
    if server.resolved is None:
        return "unresolved"
    if taken is not None:
        return "blocked"
    if server.weights_bytes is None:
        return "no weights"  # a plan needs config.json only: no fault, but nothing to start either
    return "blocked" if server.blocked else "ok"


def _memory(prepared: Prepared, claims: Mapping[str, Claim]) -> MemoryReport:
    enabled = [server for server in prepared.servers.values() if server.spec.enabled]
    budget = prepared.budget_bytes
    needs = sum(claim.needs_bytes for claim in claims.values())
    wants = sum(claim.wants_bytes for claim in claims.values())
    return MemoryReport(
        device=prepared.machine.device_name,
        machine_bytes=prepared.machine.total_bytes,
        budget_bytes=budget,
        weights_bytes=sum(claim.weights_bytes for claim in claims.values()),
        kv_bytes=sum(server.kv_bytes or 0 for server in enabled),
        needs_bytes=needs,
        wants_bytes=wants,
        fits="yes" if wants <= budget else "not all at once" if needs <= budget else "no",
        unknown=tuple(server.name for server in enabled if server.claim is None),
    )
