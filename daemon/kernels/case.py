"""What fused kernels are asked to do: everything that selects a kernel, and nothing that changes from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import mlx.core as mx

from daemon.kernels.keys import KeyTransform
from daemon.kernels.stored import Stored
from daemon.policy.schemes import Codec, Scheme

Masking = Literal["none", "boolean", "additive"]
KeyMean = Literal["none", "constant", "rotary"]


class Attend(Protocol):
    """What has an `attend` under reference.attend's contract."""

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend from the newest tokens' *queries* to everything *stored*."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of call of `attend`. Lengths, positions, strides and capacities are data, not part of it.

    *mask* none means causal, as everywhere. *scaled_keys*: packed keys were divided by a factor per
    channel, which belongs into the queries. *key_mean*: what was subtracted from packed keys, a mean that
    is the same at every position (softmax cancels it among packed tokens, not against sinks and tail) or
    one that rotates with the position.
    """

    k: Codec
    v: Codec
    dim_k: int
    dim_v: int
    n_heads: int
    n_kv_heads: int
    queries: int
    dtype: mx.Dtype
    mask: Masking = "none"
    learned_sinks: bool = False
    scaled_keys: bool = False
    key_mean: KeyMean = "none"

    @classmethod
    def of(
        cls, queries: mx.array, stored: Stored, mask: mx.array | None, sinks: mx.array | None
    ) -> Case:
        """Return the case of a call with these arguments."""
        layout = stored.layout
        keys = stored.keys
        return cls(
            k=layout.k,
            v=layout.v,
            dim_k=layout.dim_k,
            dim_v=layout.dim_v,
            n_heads=queries.shape[0],
            n_kv_heads=stored.n_kv_heads,
            queries=queries.shape[1],
            dtype=queries.dtype,
            mask=_masking(mask),
            learned_sinks=sinks is not None,
            scaled_keys=keys is not None,
            key_mean=key_mean(keys),
        )

    def __str__(self) -> str:
        extras = {
            f"{self.mask} mask": self.mask != "none",
            "learned sinks": self.learned_sinks,
            "scaled keys": self.scaled_keys,
            f"{self.key_mean} key mean": self.key_mean != "none",
        }
        parts = [
            Scheme(self.k, self.v).name,
            f"{self.n_heads} query heads on {self.n_kv_heads} of {self.dim_k}/{self.dim_v} values",
            f"{self.queries} {str(self.dtype).rsplit('.', 1)[-1]} queries",
            *(name for name, there in extras.items() if there),
        ]
        return ", ".join(parts)


def _masking(mask: mx.array | None) -> Masking:
    if mask is None:
        return "none"
    return "boolean" if mask.dtype == mx.bool_ else "additive"


def key_mean(keys: KeyTransform | None) -> KeyMean:
    """Return what *keys* subtracts from packed keys, as a Case says it."""
    if keys is None or keys.mean is None:
        return "none"
    return "constant" if keys.rotary is None else "rotary"
