"""The channel between supervisor and worker: JSON lines over one socketpair (fd 3 in the worker).

The supervisor writes a `WorkerSpec` as the first line, then `Live` and `Drain`; the worker writes the
other messages. End of file is the lease: the peer is gone. A listening socket comes along as fd 4.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from daemon.config.spec import ServerSpec
from daemon.policy.spec import KvRequest

PROTOCOL = 1  # raised when a message changes its meaning; a worker of another protocol is refused
CHANNEL_FD = 3
LISTEN_FD = 4


class Message(BaseModel):
    """Base of what crosses the channel: immutable; unknown keys of a newer peer are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class WorkerSpec(Message):
    """Everything a worker needs to know; the first line it reads."""

    type: Literal["spec"] = "spec"
    protocol: int = PROTOCOL
    name: str
    launch: int
    nonce: str
    spec_hash: str
    model_path: str
    server: ServerSpec
    kv: KvRequest
    api_key: str | None = Field(None, repr=False, description="resolved from a reference or a file")
    fingerprint: str | None = Field(None, description="of the model; names its calibration profile")
    profiles: str | None = Field(None, description="the folder of calibration profiles")
    memory_limit_bytes: int | None = Field(
        None, description="the share of the machine's memory; null: nobody counts"
    )
    memory_reserve_bytes: int = Field(
        0, description="of that, for the process and for reading prompts"
    )
    allowed_low_bit_keys: str | None = Field(
        None, description="why keys at 4 bits or fewer are allowed; null: they are not"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Live(Message):
    """Changes that need no restart: aliases, api_key, max_concurrent, queue, sampling, the share of memory."""

    type: Literal["live"] = "live"
    spec_hash: str
    server: ServerSpec
    api_key: str | None = Field(None, repr=False)
    memory_limit_bytes: int | None = None


class Drain(Message):
    """Refuse new requests, finish the running ones, then exit with 0."""

    type: Literal["drain"] = "drain"
    timeout_s: float


class Hello(Message):
    """The first line of a worker, before it imports anything heavy."""

    type: Literal["hello"] = "hello"
    protocol: int = PROTOCOL
    nonce: str
    pid: int


class Progress(Message):
    """How far loading has come; *fraction* grows from 0 to 1."""

    type: Literal["progress"] = "progress"
    stage: str
    fraction: float


class LayerReport(Message):
    """Adjacent layers that got the same treatment."""

    first: int
    last: int
    kind: str
    requested: str
    effective: str
    reason: str | None = None
    backend: str = Field(
        "mlx", description="which attention runs: reference | cpu | metal | cuda | mlx"
    )
    backend_reason: str | None = Field(None, description="why not the device's own kernels")
    packing_backend: str = Field(
        "mlx", description="what packs tokens: reference | metal | cuda; mlx: none are packed"
    )
    packing_reason: str | None = Field(None, description="why not the device's own kernels")


class KvReport(Message):
    """The effective KV policy as the worker built it, and what it costs."""

    policy: str
    summary: str
    layers: tuple[LayerReport, ...]
    effective: dict[str, int] = Field(description="scheme → number of layers")
    warnings: tuple[str, ...] = ()
    sink_tokens: int
    tail_tokens: int
    calibration: str = Field("none", description="where the statistics of the keys come from")
    backend: str = Field(description="which attention runs; several where layers differ")
    packing_backend: str = Field(
        "mlx", description="what packs tokens; several where layers differ"
    )
    bytes_per_token: float = Field(description="measured on real buffers of packed tokens")
    bytes_per_token_fp16: float = Field(description="the same layers in a 16-bit cache")


class ModelReport(Message):
    """Facts about the loaded model."""

    id: str
    path: str
    model_type: str
    layers: int
    max_context: int
    weights_bytes: int
    device: str
    mlx_version: str
    mlx_lm_version: str


class Ready(Message):
    """The model is loaded and the generation loop runs."""

    type: Literal["ready"] = "ready"
    nonce: str
    spec_hash: str
    load_s: float
    model: ModelReport
    kv: KvReport


class OpenRequest(Message):
    """A request that is not finished; what it asks and what it gets are nobody's business."""

    id: str
    age_s: float
    stream: bool
    prompt_tokens: int = Field(description="0 until the prompt is tokenized")
    completion_tokens: int


class Histogram(Message):
    """Observations counted by upper bound; the last count, one more than bounds, is of all above them."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @model_validator(mode="after")
    def _a_count_for_each_bound(self) -> Self:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError("a histogram has one count more than it has bounds")
        return self


class RequestCounts(Message):
    """What a worker has counted about its requests since its start."""

    answered: dict[str, dict[str, int]] = Field(
        description="endpoint → HTTP status code → requests"
    )
    duration_s: Histogram
    ttft_s: Histogram
    tpot_s: Histogram
    queue_time_s: Histogram | None = Field(description="null before the engine runs")


class Snapshot(Message):
    """The worker's state, pushed each second; *generation* grows with every pass of the engine's loop."""

    type: Literal["snapshot"] = "snapshot"
    generation: int
    running: int
    waiting: int
    requests_total: int
    errors_total: int
    rejected_total: int
    cancelled_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prompt_tps: float = Field(description="over the last minute")
    decode_tps: float = Field(description="over the last minute")
    kv_bytes: int = Field(description="allocated by live sequences")
    kv_tokens: int
    mlx_active_bytes: int
    mlx_cache_bytes: int
    mlx_peak_bytes: int
    kv_reserved_bytes: int = Field(0, description="what the sequences that run may grow to")
    memory_promised_bytes: int = Field(
        0, description="the most that the worker may come to use: its share, or what runs beyond it"
    )
    open: tuple[OpenRequest, ...] = Field((), description="oldest first, the first hundred")
    kv_limit_bytes: int | None = Field(None, description="the most that they may; null: no limit")
    kv_packing_s: float | None = Field(
        None, description="time spent packing, estimated; null where nothing is packed"
    )
    passed_at: float | None = Field(
        None, description="when the engine's loop last passed, in seconds since the epoch"
    )
    ttft_p50_s: float | None = Field(None, description="over the last minute")
    ttft_p95_s: float | None = Field(None, description="over the last minute")
    requests: RequestCounts | None = Field(
        None, description="null: as in the last snapshot that had them"
    )


class Ack(Message):
    """A `Live` change is in force."""

    type: Literal["ack"] = "ack"
    spec_hash: str


class Fatal(Message):
    """Why the worker is about to exit, in words for a user."""

    type: Literal["fatal"] = "fatal"
    code: int
    message: str
    hint: str | None = None


ToWorker = Annotated[WorkerSpec | Live | Drain, Field(discriminator="type")]
FromWorker = Annotated[
    Hello | Progress | Ready | Snapshot | Ack | Fatal, Field(discriminator="type")
]

to_worker: TypeAdapter[WorkerSpec | Live | Drain] = TypeAdapter(ToWorker)
from_worker: TypeAdapter[Hello | Progress | Ready | Snapshot | Ack | Fatal] = TypeAdapter(
    FromWorker
)


def encode(message: Message) -> bytes:
    """Return *message* as one line of JSON."""
    return message.model_dump_json().encode() + b"\n"
