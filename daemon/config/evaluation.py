"""What `tqd eval` hands to its measuring process on stdin, and the report that comes back."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from daemon.policy.rules import Measured
from daemon.policy.spec import KvRequest


class Document(BaseModel):
    """Base of what the two processes tell each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Contender(Document):
    """One policy to measure, and what to call it."""

    label: str
    kv: KvRequest


class EvalJob(Document):
    """What to measure; paths are absolute.

    *context* is the prompt tokens of a window; *profiles* the folder of the calibration profiles, where
    that of the model with *fingerprint* is found, or stored once it is measured.
    """

    model: str
    model_path: str
    contenders: tuple[Contender, ...]
    windows: int
    context: int
    fingerprint: str | None = None
    profiles: str | None = None
    text: str | None = None
    plot: str | None = None


class Figures(Document):
    """The divergence from the fp16 cache over all positions of one kind of text; nats.

    The standard error is that of the mean over windows; one window has none.
    """

    positions: int
    kld_mean: float
    kld_standard_error: float | None
    kld_median: float
    kld_p999: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    perplexity_delta: float


class Needle(Document):
    """Whether a sentence at *depth* percent was found: read at once, and continuing a cached prefix."""

    depth: int
    fresh: bool
    continued: bool


class Served(Document):
    """Tokens per second through the scheduler that serves: *sequences* one after the other, and all at once.

    *same_as_alone*: how many of them got the same tokens in the batch as alone.
    """

    sequences: int
    prompt_tps: float
    decode_tps: float
    batch_decode_tps: float
    same_as_alone: int


class LayerRun(Document):
    """Adjacent layers that got the same treatment; *last* is included."""

    first: int
    last: int
    kind: str
    requested: str
    effective: str
    reason: str | None


class PolicyFigures(Document):
    """One policy, as it was really in force, and what it costs.

    *key_bits* is the most bits of keys among the layers that are packed, boundary layers aside. Bytes are those of one sequence, of real buffers
    with 16-bit numbers where they are not packed; *context_bytes* stand for the report's *contexts*.
    """

    label: str
    summary: str
    layers: tuple[LayerRun, ...]
    warnings: tuple[str, ...]
    sink_tokens: int
    tail_tokens: int
    calibration: str
    calibrated: bool
    key_bits: float
    bits_per_value: float
    bytes_per_token: float
    bytes_per_token_fp16: float
    context_bytes: tuple[int, ...]
    natural: Figures
    copy_test: Figures
    needles: tuple[Needle, ...]
    served: Served


class EvalReport(Document):
    """Everything measured in one run of `tqd eval`."""

    model: str
    model_type: str
    text: str
    windows: int
    prompt_tokens: int
    scored_tokens: int
    versions: dict[str, str]
    device: str
    platform: str
    date: str
    contexts: tuple[int, ...]
    context_bytes_fp16: tuple[int, ...]
    reference_needles: tuple[Needle, ...]
    reference_served: Served
    policies: tuple[PolicyFigures, ...]

    def measured(self, policy: PolicyFigures) -> Measured:
        """Return the figures of *policy* as the allow-list keeps them."""
        return Measured(
            policy=(
                f"{policy.label} ({policy.summary}), {policy.sink_tokens} sinks, tail {policy.tail_tokens},"
                f" calibration {policy.calibration}"
            ),
            kld=policy.natural.kld_mean,
            copy_kld=policy.copy_test.kld_mean,
            positions=policy.natural.positions,
            text=self.text,
            versions={**self.versions, "device": self.device},
            date=self.date,
        )
