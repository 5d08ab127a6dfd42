"""The shape of the status document, for those who build it and those who read it.

Bytes are integers, durations seconds, moments ISO 8601 in UTC. A section that nothing is known about is
null. New keys may come at any time; `SCHEMA` is raised when one changes its meaning or goes away.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, TypedDict

from daemon.config.pressure import Pressure
from daemon.errors import Problem

SCHEMA = 1

Verdict = Literal["ok", "degraded", "failing"]


class DaemonStatus(TypedDict):
    """The supervisor itself. *status_endpoint* is null when it is off or could not be opened.

    *backend* is what workers compute on: metal, cuda or cpu; *mlx_version* is installed beside the daemon.
    """

    version: str
    mlx_version: str
    backend: str
    pid: int
    started_at: str
    uptime_s: float
    host: str
    platform: str
    state: Literal["running", "stopping"]
    verdict: Verdict
    state_dir: str
    status_endpoint: str | None
    status_endpoint_error: str | None


class ProblemStatus(TypedDict):
    """One thing wrong with the file on disk."""

    file: str
    line: int
    col: int
    path: str
    message: str
    hint: str | None


class DivergentStatus(TypedDict):
    """A server that runs its previous section, because the file's (*spec_hash*) did not become ready."""

    server: str
    reason: str
    reason_code: str
    hint: str | None
    since: str
    spec_hash: str


class ConfigSection(TypedDict):
    """What is on disk against what is in force."""

    path: str
    state: str
    in_sync: bool
    hash_on_disk: str | None
    hash_applied: str | None
    applied_at: str | None
    last_attempt_at: str | None
    generation: int
    reload: str
    errors: list[ProblemStatus]
    warnings: list[str]
    pending: list[str]
    divergent: list[DivergentStatus]


class Health(TypedDict):
    """*live*: there is a process that speaks; *ready*: it can take requests now."""

    live: bool
    ready: bool
    heartbeat_age_s: float | None


class Restarts(TypedDict):
    """Restarts after failures."""

    total: int
    in_window: int
    max: int
    consecutive_failures: int
    next_attempt_at: str | None


class ExitStatus(TypedDict):
    """How the last worker ended; *code* is negative for a signal."""

    launch: int
    code: int | None
    at: str
    classified: str
    tail: list[str]


class Endpoint(TypedDict):
    """Where the server answers."""

    host: str
    port: int
    url: str


class ModelStatus(TypedDict):
    """The loaded model."""

    id: str
    path: str
    model_type: str
    layers: int
    max_context: int
    device: str
    mlx_version: str
    mlx_lm_version: str


class Requests(TypedDict):
    """Requests now, and since the worker started."""

    running: int
    waiting: int
    capacity: int
    total: int
    errors: int
    rejected: int
    cancelled: int


class Throughput(TypedDict):
    """Tokens and times to the first one, over the last minute; totals are since the worker started.

    The times are null where no request got a token within the window.
    """

    prompt_tps: float
    decode_tps: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    window_s: int
    prompt_tokens_total: int
    generation_tokens_total: int


class MachineMemory(TypedDict):
    """The memory that all servers share.

    *planned_bytes* are what workers hold: their shares, or what runs or is used beyond them. *over_budget*:
    that is more than the budget; nothing is ended for it, and nothing new starts. *wired_bytes* cannot be
    swapped, whoever has them; *unattributed_wired_bytes* are what MLX in our workers does not account for: the
    system's and other programs', and what a killed process may have left behind. Only a Mac counts them.
    """

    device: str
    device_name: str
    total_bytes: int
    budget_bytes: int
    planned_bytes: int
    free_bytes: int
    over_budget: bool
    used_footprint_bytes: int
    available_bytes: int | None
    swap_used_bytes: int | None
    wired_bytes: int | None
    unattributed_wired_bytes: int | None
    pressure: Pressure | None


class Memory(TypedDict):
    """Bytes of one server: what the plan says, what the worker reports, what was measured of its process.

    It *needs* the first to start and has a use for no more than the second; *planned* is its share, *held*
    what nobody else can have. *kv_reserved* is what the sequences that run may grow to.
    """

    needs_bytes: int | None
    wants_bytes: int | None
    planned_bytes: int | None
    held_bytes: int
    weights_bytes: int | None
    kv_bytes: int | None
    kv_reserved_bytes: int | None
    kv_limit_bytes: int | None
    mlx_active_bytes: int | None
    mlx_cache_bytes: int | None
    mlx_peak_bytes: int | None
    process_footprint_bytes: int | None


class KvRequested(TypedDict):
    """What servers.yaml and the named policy ask for."""

    policy: str
    k: str
    v: str
    boundary_v: int
    boundary_mode: str
    sink_tokens: int
    tail_tokens: int
    fold_tokens: int
    strict: bool


class LayerGroup(TypedDict):
    """Adjacent layers that got the same treatment, as the worker's probe found them."""

    first: int
    last: int
    kind: str
    requested: str
    effective: str
    reason: str | None
    backend: str
    backend_reason: str | None
    packing_backend: str
    packing_reason: str | None


class Fallback(TypedDict):
    """Adjacent layers that did not get what was asked for."""

    layers: list[int]
    mode: str
    reason: str | None


class Kv(TypedDict):
    """The KV policy as requested, and as the worker built and measured it; null until it has."""

    requested: KvRequested
    summary: str | None
    effective_modes: dict[str, int] | None
    fallbacks: list[Fallback] | None
    warnings: list[str]
    calibration: str | None
    backend: str | None
    packing_backend: str | None
    bytes_per_token: float | None
    bytes_per_token_fp16: float | None
    compression: float | None
    tokens_live: int | None
    bytes_live: int | None


class ServerStatus(TypedDict):
    """One server. *log_dropped_bytes* of its output were lost since the daemon started: no disk could take them."""

    name: str
    aliases: list[str]
    labels: dict[str, str]
    enabled: bool
    desired: str
    desired_source: str
    state: str
    state_since: str
    reason: str | None
    reason_code: str | None
    hint: str | None
    health: Health
    pid: int | None
    launch: int
    started_at: str | None
    ready_at: str | None
    load_s: float | None
    load_stage: str | None
    load_progress: float | None
    restarts: Restarts
    last_exit: ExitStatus | None
    endpoint: Endpoint
    spec_hash: str
    worker_spec_hash: str | None
    log_path: str
    log_dropped_bytes: int
    model: ModelStatus | None
    model_requested: str
    requests: Requests | None
    throughput: Throughput | None
    memory: Memory | None
    kv: Kv | None
    layers: list[LayerGroup] | None
    sampled_at: str | None


class OpenRequest(TypedDict):
    """A request that was not finished when it was sampled; *prompt_tokens* is 0 until the prompt is read."""

    id: str
    age_s: float
    stream: bool
    prompt_tokens: int
    completion_tokens: int


class OpenRequests(TypedDict):
    """The document of ``GET /v1/servers/{name}/requests``: the oldest hundred, never a prompt."""

    sampled_at: str | None
    requests: list[OpenRequest]


class Document(TypedDict):
    """The whole document. *seq* is the number of the newest event (``GET /v1/events``)."""

    schema: int
    seq: int
    now: str
    daemon: DaemonStatus
    config: ConfigSection
    memory: MachineMemory | None
    servers: list[ServerStatus]


def moment(when: datetime) -> str:
    """Return *when* as ISO 8601 in UTC, to the millisecond."""
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def problem_status(problem: Problem) -> ProblemStatus:
    """Return *problem* as JSON."""
    return {
        "file": problem.file,
        "line": problem.line,
        "col": problem.col,
        "path": problem.path,
        "message": problem.message,
        "hint": problem.hint,
    }
