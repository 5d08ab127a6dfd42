"""Worker specs for tests."""

from __future__ import annotations

from typing import Any

from daemon.config.spec import ServerSpec
from daemon.config.wire import WorkerSpec
from daemon.policy.spec import KvRequest


def worker_spec(*, api_key: str | None = None, name: str = "chat", **server: Any) -> WorkerSpec:
    """Return the spec of a server with the given keys of its servers.yaml entry."""
    entry = {"model": "org/small-model", "port": 8001, "aliases": ["small"]} | server
    return WorkerSpec(
        name=name,
        launch=1,
        nonce="nonce-1",
        spec_hash="abcd1234",
        model_path="models/small",
        server=ServerSpec(**entry),
        api_key=api_key,
        kv=KvRequest(
            policy="balanced",
            k="int8",
            v="turbo4",
            explicit=False,
            boundary_v=0,
            boundary_mode="int8",
            boundary_k="auto",
            sink_tokens=4,
            tail_tokens=32,
            strict=False,
        ),
    )
