"""What the HTTP side and the engine say to each other: plain data, no MLX, no HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from daemon.config.wire import Histogram

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Validated before it gets here: the engine trusts every field."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate; *prompt* holds token ids, at least one."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int | None = None
    """None: no log-probabilities; 0: of the sampled token only; n: also of the n likeliest."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. The token that ends a sequence by *stop* carries no text to show."""

    token: int
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's numbers at one moment; counters grow from the start of the worker.

    *passed_at* is when the loop last passed, in seconds since the epoch.
    """

    generation: int = 0
    passed_at: float | None = None
    running: int = 0
    waiting: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    kv_bytes: int = 0
    kv_tokens: int = 0
    kv_reserved_bytes: int = 0
    kv_limit_bytes: int | None = None
    mlx_active_bytes: int = 0
    mlx_cache_bytes: int = 0
    mlx_peak_bytes: int = 0
    queue_time_s: Histogram | None = None
    packing_s: float | None = None


class QueueFullError(Exception):
    """The waiting line has no place left; try again after *retry_after_s*. *for_memory*: that is what it waits for."""

    def __init__(self, retry_after_s: int, *, for_memory: bool = False) -> None:
        super().__init__(f"the queue is full; retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s
        self.for_memory = for_memory


class TooLargeError(Exception):
    """A sequence may grow to more memory than all of them together may take; waiting would not help."""

    def __init__(self, tokens: int, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes are more than {limit_bytes}")
        self.tokens = tokens
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class EngineFailedError(Exception):
    """The engine stopped in the middle of a sequence; the worker is about to be replaced."""


class Generation(Protocol):
    """One running sequence: iterate to receive its tokens in batches, as the engine produced them."""

    def __aiter__(self) -> AsyncIterator[Sequence[TokenEvent]]:
        """Yield batches until one holds a finish reason; raises EngineFailedError."""
        ...

    def abort(self) -> None:
        """End the sequence within one step; safe to call at any time, from the event loop."""
        ...


class Engine(Protocol):
    """What the HTTP side needs of the engine; the real one owns the MLX thread."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue *request*; raises QueueFullError, TooLargeError, or EngineFailedError when the engine is dead."""
        ...

    def stats(self) -> EngineStats:
        """Return the latest numbers; never waits for the MLX thread."""
        ...

    def set_limits(
        self,
        *,
        max_concurrent: int,
        queue: int,
        kv_limit_bytes: int | None,
        memory_limit_bytes: int | None,
    ) -> None:
        """Change the admission limits, and what MLX may use; running sequences are not touched."""
        ...
