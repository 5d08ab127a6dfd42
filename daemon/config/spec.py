"""What servers.yaml means: frozen models, one per block, one field per key.

Every field has a description; `tqd schema`, servers.yaml.example and the tests read them.
Positions, includes, environment references and all refusals belong to daemon.config.load.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from daemon.policy.spec import FrozenModel, KvSpec, later
from daemon.units import Budget, Duration, Size

SCHEMA_VERSION = 1

ServerName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class SamplingSpec(FrozenModel):
    """Defaults for requests that do not say; null leaves the API's own default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 is greedy.", strict=False
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Nucleus sampling.", strict=False
    )
    top_k: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Keep the k likeliest tokens; 0 is off."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Drop tokens under this share of the best.", strict=False
    )
    repetition_penalty: Annotated[float, Field(gt=0)] | None = Field(
        None, description="1 is off.", strict=False
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Default cap; null is the rest of the context."
    )


class RestartSpec(FrozenModel):
    """What happens after a worker exits."""

    policy: Literal["on-failure", "always", "never"] = Field(
        "on-failure", description="When to start it again."
    )
    max: Annotated[int, Field(ge=0)] = Field(
        5, description="Restarts within the window before the server is failed."
    )
    window: Duration = Field(600.0, description="The window that max counts in.")
    backoff: Annotated[tuple[Duration, Duration], Field(strict=False)] = Field(
        (1.0, 60.0), description="First and longest delay; doubles in between."
    )
    stable_after: Duration = Field(300.0, description="Ready this long resets the count.")


class ProbeSpec(FrozenModel):
    """When a worker that does not move counts as hung."""

    interval: Duration = Field(5.0, description="How often liveness is judged.")
    stall: Duration = Field(
        60.0,
        description="No heartbeat of the generation loop for this long: degraded, then replaced.",
    )
    load_stall: Duration = Field(120.0, description="No load progress for this long: replaced.")


class SnapshotSpec(FrozenModel):
    """Exact-prefix snapshots of recurrent and rotating layers."""

    capacity: Size = Field(512 * 2**20, description="Bytes.")
    max_entries: Annotated[int, Field(ge=0)] = Field(16, description="Snapshots.")


class PromptCacheSpec(FrozenModel):
    """Reuse of common prompt prefixes."""

    capacity: Size = Field(2 * 2**30, description="Bytes; 0 turns it off.")
    max_entries: Annotated[int, Field(ge=0)] = Field(64, description="Prefixes.")
    ttl: Duration | None = Field(None, description="Forget a prefix unused for this long.")
    disk: str | None = Field(None, description="Folder of a disk tier that survives restarts.")
    snapshots: SnapshotSpec = Field(
        SnapshotSpec(), description="Snapshots of layers that cannot be trimmed."
    )


class ApiKeyFile(FrozenModel):
    """An API key kept in a file of its own."""

    file: str = Field(description="Path; the first line is the key.")


class ServerSpec(FrozenModel):
    """One entry of `servers`: a model, a port, and how its KV cache is kept."""

    model: str = Field(min_length=1, description="Hub id, or a path relative to this file.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    adapter: str | None = later(None, "Path of a LoRA adapter.")
    draft_model: str | None = later(None, "Draft model for speculative decoding.")
    host: str = Field(
        "127.0.0.1", description="Address to listen on; one that is not loopback needs an api_key."
    )
    port: Port = Field(description="Port to listen on.")
    aliases: tuple[str, ...] = Field(
        (), description="Other model names that requests may use.", strict=False
    )
    enabled: bool = Field(
        True, description="false: shown as stopped, not planned for, name reserved."
    )
    autostart: bool = Field(True, description="false: starts only by `tqd start`.")
    idle_unload: Duration | None = later(None, "Unload after this long without requests.")
    max_context: Annotated[int, Field(ge=16)] | None = Field(
        None,
        description="Tokens per sequence; default: the model's own, lowered so that one fits this machine.",
    )
    max_concurrent: Annotated[int, Field(ge=1, le=256)] = Field(
        8, description="Sequences decoded together."
    )
    queue: Annotated[int, Field(ge=0)] = Field(
        64, description="Waiting requests; beyond it 429 with Retry-After."
    )
    api_key: str | ApiKeyFile | None = Field(
        None, description="${env:NAME} or {file: path}; null is open.", repr=False
    )
    cors_origins: tuple[str, ...] = Field(
        ("localhost",), description="Origins that browsers may call from.", strict=False
    )
    allowed_hosts: tuple[str, ...] = Field(
        ("localhost",), description="Accepted Host headers.", strict=False
    )
    sampling: SamplingSpec = Field(
        SamplingSpec(), description="Defaults for requests that do not say."
    )
    chat_template: str | None = Field(
        None, description="Path of a Jinja chat template; default: the model's own."
    )
    trust_remote_code: bool = later(False, "Run code that comes with the model.")
    env: dict[str, str] = Field({}, description="Extra environment of the worker.", repr=False)
    python: str | None = Field(
        None, description="Another interpreter (a virtual environment) for this worker."
    )
    kv: KvSpec = Field(KvSpec(), description="The KV-cache policy.")
    prompt_cache: PromptCacheSpec = later(PromptCacheSpec(), "Reuse of common prompt prefixes.")
    restart: RestartSpec = Field(RestartSpec(), description="What happens after the worker exits.")
    probe: ProbeSpec = Field(ProbeSpec(), description="When a worker counts as hung.")
    drain_timeout: Duration = Field(
        30.0, description="Time for running requests to finish before a stop."
    )
    stop_grace: Duration = Field(60.0, description="Time between SIGTERM and SIGKILL.")
    labels: dict[str, str] = Field({}, description="Shown in status; no effect.")
    distributed: dict[str, object] | None = later(None, "Several machines for one model.")


class LogSpec(FrozenModel):
    """The daemon's log and the servers' logs."""

    dir: str | None = Field(
        None, description="Folder of the servers' logs; default: logs/servers in the state folder."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is written."
    )
    format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: console on a terminal, JSON elsewhere."
    )
    max_size: Size = Field(50 * 2**20, description="A log file is rotated at this size.")
    backups: Annotated[int, Field(ge=0)] = Field(5, description="Rotated files kept.")


class DaemonSpec(FrozenModel):
    """The `daemon` block: the supervisor itself."""

    control: str | None = Field(
        None, description="Unix socket for the CLI; default: tqd.sock in the state folder."
    )
    status: str | None = Field(
        "127.0.0.1:8700",
        description="host:port of the ops endpoint and its dashboard; null turns it off.",
    )
    gateway: str | None = later(None, "host:port of one OpenAI endpoint for every server.")
    memory_budget: Budget = Field(
        "auto",
        description="What all servers together may use: bytes, a share, or auto (75 % of the machine).",
    )
    max_parallel_loads: Annotated[int, Field(ge=1)] = Field(
        1, description="Models loaded at the same time."
    )
    reload: Literal["auto", "manual", "off"] = Field(
        "auto", description="auto | manual (`tqd reload` applies) | off."
    )
    log: LogSpec = Field(LogSpec(), description="Logs.")


class Servers(FrozenModel):
    """A whole configuration: defaults merged, paths absolute, environment references resolved."""

    path: Path = Field(strict=False)
    daemon: DaemonSpec = DaemonSpec()
    servers: dict[str, ServerSpec]
    origins: dict[str, str] = Field({}, description="server name → `file:line` of its entry")


def spec_hash(*documents: str) -> str:
    """Return the short content hash that ties a worker to the spec it was started with."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()[:16]
