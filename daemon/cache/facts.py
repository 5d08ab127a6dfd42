"""What a snapshot says about itself: how each vector is stored, where each token is, what it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from daemon.cache.row import Row
from daemon.cache.side import RowState
from daemon.kernels import codebook, trellis
from daemon.kernels.packing import LAYOUT_VERSION, TILE
from daemon.kernels.rotation import SEED_VERSION
from daemon.policy.schemes import Codec


class Facts(BaseModel):
    """Base of what a description holds: closed, immutable, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SideFacts(Facts):
    """How the keys, or the values, of a row are stored; *codebook* is a hash of the centroids or levels."""

    codec: str
    bits: float
    scale_rule: str | None
    codebook: str | None
    dim: NonNegativeInt
    dtype: str


class RowFacts(Facts):
    """One SequenceCache, or LatentCache: its policy, and what it holds."""

    kind: Literal["SequenceCache", "LatentCache"] = "SequenceCache"
    scheme: str
    sink_tokens: NonNegativeInt
    tail_tokens: NonNegativeInt
    fold_tokens: NonNegativeInt
    token_budget: NonNegativeInt | None
    statistics_id: str | None
    length: NonNegativeInt
    dropped: NonNegativeInt
    packed_to: NonNegativeInt
    n_kv_heads: NonNegativeInt
    k: SideFacts
    v: SideFacts


class GrowingFacts(Facts):
    """One KVCache of mlx-lm."""

    kind: Literal["KVCache"] = "KVCache"
    length: NonNegativeInt


class RotatingFacts(Facts):
    """One RotatingKVCache of mlx-lm; *index* is where it writes next."""

    kind: Literal["RotatingKVCache"] = "RotatingKVCache"
    max_size: NonNegativeInt
    keep: NonNegativeInt
    length: NonNegativeInt
    index: NonNegativeInt


class ArraysFacts(Facts):
    """One ArraysCache of mlx-lm, a recurrent state: *present* are the slots that hold an array."""

    kind: Literal["ArraysCache"] = "ArraysCache"
    slots: NonNegativeInt
    present: tuple[NonNegativeInt, ...] = Field(strict=False)


class ListFacts(Facts):
    """One CacheList of mlx-lm: several caches of one layer."""

    kind: Literal["CacheList"] = "CacheList"
    caches: tuple[CacheFacts, ...] = Field(strict=False)


CacheFacts = Annotated[
    RowFacts | GrowingFacts | RotatingFacts | ArraysFacts | ListFacts, Field(discriminator="kind")
]


class Snapshot(Facts):
    """The description of a whole file."""

    model: str
    policy: str
    n_tokens: NonNegativeInt
    tokens: str = Field(description="SHA-256 of the token ids")
    layout: int = LAYOUT_VERSION
    tile: int = TILE
    rotation: int = SEED_VERSION
    caches: tuple[CacheFacts, ...] = Field(strict=False)


# Which scale goes with the codes, by kind of codec (daemon.kernels.codec has the formulas); fp16 has none.
_SCALE_RULES = {"turbo": "unbiased", "trellis": "unbiased", "int": "absmax", "affine": "groups"}


def flat(caches: Sequence[CacheFacts], prefix: str = "") -> Iterator[tuple[str, CacheFacts]]:
    """Yield every cache with its place: "3", or "3.1" inside a list."""
    for i, facts in enumerate(caches):
        if isinstance(facts, ListFacts):
            yield from flat(facts.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", facts


def row_facts(row: Row, state: RowState, *, latent: bool = False) -> RowFacts:
    """Return the facts of a row like *row* that holds *state*, in a layer with *latent* attention or another."""
    return RowFacts(
        kind="LatentCache" if latent else "SequenceCache",
        scheme=row.scheme.name,
        sink_tokens=row.sink_tokens,
        tail_tokens=row.tail_tokens,
        fold_tokens=row.fold_tokens,
        token_budget=row.token_budget,
        statistics_id=row.statistics_id,
        length=state.length,
        dropped=state.dropped,
        packed_to=state.packed_to,
        n_kv_heads=state.n_kv_heads,
        k=_side_facts(row.scheme.k, state.dim_k, state.dtype_k),
        v=_side_facts(row.scheme.v, state.dim_v, state.dtype_v),
    )


def _side_facts(codec: Codec, dim: int, dtype: str) -> SideFacts:
    rule = _SCALE_RULES.get(codec.name.rstrip("0123456789."))
    pin = None
    if rule == "unbiased" and dim:
        values = trellis.levels() if codec.trellis else codebook.centroids(codec.bits, dim)
        pin = hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()
    return SideFacts(
        codec=codec.name, bits=codec.bits, scale_rule=rule, codebook=pin, dim=dim, dtype=dtype
    )
