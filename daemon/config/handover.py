"""What a worker is told of its server: all of it when it starts, and later the keys that change live."""

from __future__ import annotations

from pathlib import Path

from daemon.config.prepare import PreparedServer
from daemon.config.spec import ServerSpec
from daemon.config.wire import Live, WorkerSpec
from daemon.log import Level


def worker_spec(
    server: PreparedServer,
    *,
    launch: int,
    nonce: str,
    log_level: Level = "info",
    memory_limit_bytes: int | None = None,
    profiles: Path | None = None,
) -> WorkerSpec:
    """Return what the worker of *server*, which must not be blocked, reads first."""
    if server.facts is None:
        raise ValueError(f"{server.name} has no model to load")
    return WorkerSpec(
        name=server.name,
        launch=launch,
        nonce=nonce,
        spec_hash=server.spec_hash,
        model_path=str(server.facts.folder),
        server=_for_worker(server),
        kv=server.kv,
        api_key=server.api_key,
        fingerprint=server.facts.fingerprint,
        profiles=str(profiles) if profiles else None,
        memory_limit_bytes=memory_limit_bytes,
        memory_reserve_bytes=_reserve_bytes(server),
        allowed_low_bit_keys=server.allowed,
        log_level=log_level,
    )


def live_message(server: PreparedServer, memory_limit_bytes: int | None = None) -> Live:
    """Return what tells a running worker of *server* about the keys that change without a restart."""
    return Live(
        spec_hash=server.spec_hash,
        server=_for_worker(server),
        api_key=server.api_key,
        memory_limit_bytes=memory_limit_bytes,
    )


def _reserve_bytes(server: PreparedServer) -> int:
    return 0 if server.claim is None else server.claim.process_bytes + server.claim.scratch_bytes


def _for_worker(server: PreparedServer) -> ServerSpec:
    """Return the spec with the context that was planned for, so that the worker does not choose another."""
    return server.spec.model_copy(update={"max_context": server.max_context})
