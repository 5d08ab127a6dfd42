"""What one server asks of the machine's memory, in bytes, before anything of it is loaded.

A server *needs* its weights, its process, scratch memory, and one sequence of `max_context` tokens. It
*wants* `max_concurrent` such sequences, or what `kv.budget` says. The formulas are bounds of what was
measured on the demo model (docs/adr/0014-memory-plan.md), not exact counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.budget import EXACT_BYTES, kv_bytes, longest_context, spare_bytes
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.schemes import FP16

Device = Literal["cpu", "cuda", "metal"]
KvBudget = int | Literal["auto", "none"]

# Beside weights and MLX's arrays a worker holds Python, MLX, the tokenizer and what malloc keeps: 168 MiB of
# resident memory once the demo model was loaded (x86-64 Linux, CPU, Python 3.11, mlx 0.32.4); the rest is
# room for larger vocabularies.
PROCESS_BYTES = 256 * 2**20
# Prompt tokens between two decode steps: what a running stream waits for at most. A CPU reads some 150 tokens a second.
PREFILL_CHUNK = {"cpu": 128, "cuda": 1024, "metal": 1024}
PREFILL_ROWS = 4  # prompts read together; more would make a decode step wait longer
GROWTH_TOKENS = 256  # buffers in full precision grow by so many tokens, mlx-lm's own too
KEPT_BYTES = 512 * 2**20  # the most freed memory that MLX may keep for reuse

_FLOAT32_BYTES = 4
_FUSED_DIMS = (64, 80, 128)  # vectors for which MLX's attention on a GPU forms no matrix of scores
_CACHED = (LayerKind.FULL, LayerKind.LATENT, LayerKind.SLIDING, LayerKind.CHUNKED)
_ACTIVATIONS = 24  # vectors of the model's width alive at once for each token that is being read


@dataclass(frozen=True, slots=True)
class Claim:
    """The memory of one server, in bytes.

    *scratch_bytes* are what reading prompts takes for a moment, `max_context` tokens of them at once, and the
    freed memory that MLX keeps.
    *limited* is False under `kv.budget: none`: nothing holds the caches back, so all that is wanted is needed.
    """

    weights_bytes: int
    process_bytes: int
    scratch_bytes: int
    sequence_bytes: int
    most_kv_bytes: int
    limited: bool = True

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV cache."""
        return self.weights_bytes + self.process_bytes + self.scratch_bytes

    @property
    def needs_bytes(self) -> int:
        """The least with which the server may start."""
        return self.fixed_bytes + (self.sequence_bytes if self.limited else self.most_kv_bytes)

    @property
    def wants_bytes(self) -> int:
        """The most that it has a use for."""
        return self.fixed_bytes + max(self.sequence_bytes, self.most_kv_bytes)


@dataclass(frozen=True, slots=True)
class Sizing:
    """What memory depends on, of one model under one policy on one kind of device.

    *value_bytes* are those of a number as the model computes.
    """

    policy: ResolvedPolicy
    arch: Architecture
    weights_bytes: int
    device: Device = "cpu"
    value_bytes: int = EXACT_BYTES

    def sequence_bytes(self, tokens: int) -> int:
        """Return what one sequence takes that may grow to *tokens*."""
        return sequence_cost(self.policy, self.arch, self.value_bytes)(tokens)

    def scratch_bytes(self, context_tokens: int) -> int:
        """Return what reading prompts of *context_tokens* in all takes, and the freed memory that MLX keeps."""
        rows = PREFILL_ROWS if self.arch.batching == "rows" else 1
        layers = [layer for layer in self.arch.layers if layer.n_kv_heads]
        width = max((it.head_dim_k + it.head_dim_v for it in layers), default=0) // 2
        chunk, heads = PREFILL_CHUNK[self.device], self.arch.n_heads
        unfused = self.device == "cpu" or any(map(_unfused, layers))
        scores = 2 * heads * chunk * context_tokens if unfused else 0  # and their softmax
        activations = _ACTIVATIONS * rows * chunk * heads * width
        copied = (
            _widest(self.arch) * context_tokens
        )  # of a layer that `sequence_bytes` has unpacked
        # the tokens of a chunk are packed when the next one comes
        unpacked = rows * chunk * sum(map(_values, self.arch.layers)) * self.value_bytes
        peak = (scores + activations + copied) * _FLOAT32_BYTES + unpacked
        return peak + kept_bytes(peak)

    def longest_context(self, most_bytes: int, *, most_tokens: int) -> int:
        """Return the longest context, up to *most_tokens*, with which the server needs at most *most_bytes*."""
        fixed = self.weights_bytes + PROCESS_BYTES

        def needed(tokens: int) -> int:
            return fixed + self.scratch_bytes(tokens) + self.sequence_bytes(tokens)

        return longest_context(needed, free_bytes=most_bytes, most_tokens=most_tokens)

    def claim(self, *, max_context: int, max_concurrent: int, kv_budget: KvBudget) -> Claim:
        """Return what a server of this model asks for."""
        sequence = self.sequence_bytes(max_context)
        sequences = 1 if self.arch.batching == "alone" else max_concurrent
        return Claim(
            weights_bytes=self.weights_bytes,
            process_bytes=PROCESS_BYTES,
            scratch_bytes=self.scratch_bytes(max_context),
            sequence_bytes=sequence,
            most_kv_bytes=kv_budget if isinstance(kv_budget, int) else sequence * sequences,
            limited=kv_budget != "none",
        )


def sequence_cost(
    policy: ResolvedPolicy, arch: Architecture, value_bytes: int
) -> Callable[[int], int]:
    """Return a function that says what one sequence that may grow to so many tokens takes.

    That is its cache in whole buffers, and one layer of it unpacked, as the reference attends. Kernels that read
    packed tiles leave that unused, but only a loaded model shows whether they run.
    """
    packs = any(plan.effective.k != FP16 or plan.effective.v != FP16 for plan in policy.layers)
    unpacked = _widest(arch) * _FLOAT32_BYTES if packs else 0

    @functools.cache  # asked at every step of the engine, for a few lengths
    def of_whole(tokens: int) -> int:
        cache = kv_bytes(policy, arch, context_tokens=tokens, value_bytes=value_bytes)
        return cache + spare_bytes(policy, arch, context_tokens=tokens) + tokens * unpacked

    def cost(tokens: int) -> int:
        return of_whole(-(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS)

    return cost


def padded(policy: ResolvedPolicy) -> bool:
    """Whether some layer keeps mlx-lm's own cache, where every sequence of a batch is as long as the longest."""
    return any(
        plan.effective.k == FP16 and plan.effective.v == FP16 and plan.kind in _CACHED
        for plan in policy.layers
    )


def kept_bytes(peak_bytes: int) -> int:
    """Return how much freed memory MLX may keep beside a peak of *peak_bytes* scratch memory."""
    return min(KEPT_BYTES, peak_bytes)


def _unfused(layer: Layer) -> bool:
    return layer.head_dim_k != layer.head_dim_v or layer.head_dim_k not in _FUSED_DIMS


def _widest(arch: Architecture) -> int:
    """Return the values that the widest layer keeps of a token."""
    return max(map(_values, arch.layers), default=0)


def _values(layer: Layer) -> int:
    return layer.n_kv_heads * (layer.head_dim_k + layer.head_dim_v)
