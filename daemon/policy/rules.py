"""The shape of policies/architectures.yaml and policies/allowlist.yaml, as frozen models.

A family says in data what mlx-lm's module of that name does. The layer patterns are a small closed
set, read by daemon.policy.patterns; a family that needs another one needs code, and a test.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from daemon.policy.files import load
from daemon.resources import shipped


class LayerKind(StrEnum):
    """What a layer keeps between two tokens."""

    FULL = "full"  # keys and values of every token
    SLIDING = "sliding"  # keys and values of the newest `window` tokens
    CHUNKED = "chunked"  # keys and values of the current chunk of `window` tokens
    RECURRENT = "recurrent"  # a state of constant size, or nothing
    LATENT = "latent"  # one compressed vector and one rotary key a token (MLA)
    SHARED = "shared"  # nothing: it reads the cache of another layer


Ref = str | int | tuple[str, ...]
"""A number of a model: a dotted key of config.json, a constant, or a sum of keys."""


Batching = Literal["rows", "prefill_alone", "alone"]
"""How a module of mlx-lm bears several sequences.

`rows`: together, whatever their lengths. `prefill_alone`: one prompt at a time, because the padding
of shorter ones would enter a recurrent state. `alone`: one sequence at a time.
"""


class RuleModel(BaseModel):
    """Base of what the rule files hold: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(RuleModel):
    """Base of the layer patterns; *when* holds the keys and values that config.json must have."""

    when: dict[str, bool] = {}


class All(Rule):
    """Every layer is alike."""

    pattern: Literal["all"]
    kind: LayerKind = LayerKind.FULL


class Words(Rule):
    """A list (or a string, letter by letter) names each layer's kind; null: a block without a cache.

    Applies only where config.json has the list. *cycle* repeats it to the model's length.
    """

    pattern: Literal["words"]
    key: str
    kinds: dict[str, LayerKind | None]
    others: LayerKind | None = None
    cycle: bool = False


class EveryNth(Rule):
    """Layers n, 2n, 3n, ... counted from 1; *tail* are the layers after the last whole group of n."""

    pattern: Literal["every_nth"]
    n: str | int
    nth: LayerKind = LayerKind.FULL
    others: LayerKind
    tail: LayerKind | None = None


class PeriodOffset(Rule):
    """Layer i, counted from 0, with i % period == offset; *offset* `half` is half the period."""

    pattern: Literal["period_offset"]
    period: str
    offset: str
    at: LayerKind = LayerKind.FULL
    others: LayerKind


class Listed(Rule):
    """A list of layer numbers, which count from *base*. Applies only where config.json has it."""

    pattern: Literal["listed"]
    key: str
    base: Literal[0, 1] = 0
    listed: LayerKind
    others: LayerKind


class Blocks(Rule):
    """Nemotron-NAS: a list of blocks with an `attention` that may be missing or a linear layer."""

    pattern: Literal["blocks"]
    key: str


class Passes(Rule):
    """The layers run several times, with a cache for each pass: one of *kinds* a pass, or *times*.

    *extra* names a list whose length + 1 stands in for *times*.
    """

    pattern: Literal["passes"]
    kinds: tuple[LayerKind, ...] = Field((LayerKind.FULL,))
    times: str | None = None
    extra: str | None = None


LayerPattern = Annotated[
    All | Words | EveryNth | PeriodOffset | Listed | Blocks | Passes, Field(discriminator="pattern")
]


class Dims(RuleModel):
    """Where the cached vectors' number and length are written, where they differ from the usual keys."""

    when: str | None = Field(None, description="Counts only where this key is true.")
    heads: Ref | None = None
    kv_heads: Ref | None = Field(None, description="`heads`: as many as query heads.")
    kv_group: str | None = Field(None, description="Query heads that share one KV head.")
    head_dim: Ref | None = Field(None, description="`derived`: hidden size over heads, always.")
    head_dim_v: Ref | None = Field(None, description="Length of values, where it is not head_dim.")


class Family(RuleModel):
    """What one module of mlx-lm caches."""

    attention: Literal["dense", "latent", "expanded"] = Field(
        "dense",
        description="latent: MLA, the compressed vector is cached; expanded: MLA, keys and values are cached",
    )
    text: Literal["required", "optional", "merged"] | None = Field(
        None, description="How the language model's keys are nested in `text_config`."
    )
    inner: str | dict[str, str] | None = Field(
        None,
        description="The family of text_config, or one by its model_type (`*`: the rest); it fills in what this one does not say.",
    )
    layers: tuple[LayerPattern, ...] = Field((All(pattern="all"),))
    window: str | None = Field(None, description="Key of the window of sliding or chunked layers.")
    shared: str | None = Field(
        None, description="Key of the number of last layers that read an earlier layer's cache."
    )
    prefix: tuple[LayerKind, ...] = Field((), description="Caches before the layers'.")
    dims: Dims = Dims()
    sliding: tuple[Dims, ...] = Field((), description="Overrides, later ones win.")
    full: tuple[Dims, ...] = Field((), description="Overrides, later ones win.")
    indexer: str | None = Field(
        None, description="Key of the length of a sparse-attention indexer's cached key."
    )
    defaults: dict[str, int | bool] = Field(
        {}, description="mlx-lm's ModelArgs defaults of the keys that are read here."
    )
    boundary_k: int = Field(0, description="Boundary layers whose keys need 8 bits.")
    learned_sinks: bool | tuple[str, ...] = Field(
        False, description="Learned attention sinks, or the keys that turn them on."
    )
    batching: Batching = Field("rows", description="How several sequences may run together.")
    stock: str | None = Field(None, description="Why these layers must keep mlx-lm's own cache.")
    note: str | None = None


class Remap(RuleModel):
    """A model_type that another module serves when `architectures` has a certain name."""

    model_type: str
    architecture: str
    family: str


class Architectures(RuleModel):
    """policies/architectures.yaml."""

    mlx_lm: str = Field(description="The version of mlx-lm that the file describes.")
    aliases: dict[str, str] = Field(description="mlx_lm.utils.MODEL_REMAPPING.")
    architecture_aliases: tuple[Remap, ...] = Field(
        description="mlx_lm.utils.MODEL_ARCHITECTURE_REMAPPING."
    )
    spellings: dict[str, str] = Field(description="Other spellings found in config.json files.")
    multimodal: tuple[str, ...] = Field(
        description="Vision and audio models that mlx-lm has no text model for."
    )
    families: dict[str, Family]

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        named = {*self.aliases.values(), *self.spellings.values()}
        named |= {remap.family for remap in self.architecture_aliases}
        for family in self.families.values():
            match family.inner:
                case str(inner):
                    named.add(inner)
                case dict(by_type):
                    named |= set(by_type.values())
                case None:
                    pass
        if missing := sorted(named - self.families.keys()):
            raise ValueError(f"no such family: {', '.join(missing)}")
        return self

    def family_of(self, model_type: str, architectures: tuple[str, ...] = ()) -> str | None:
        """Return the family that mlx-lm serves *model_type* with; None when it has none."""
        for remap in self.architecture_aliases:
            if remap.model_type == model_type and remap.architecture in architectures:
                return remap.family
        name = self.spellings.get(model_type, model_type)
        name = self.aliases.get(name, name)
        return name if name in self.families else None


class Measured(RuleModel):
    """What `tqd eval` measured of one policy on one model; divergences are means in nats."""

    policy: str
    kld: float = Field(description="On natural text.")
    copy_kld: float = Field(description="On the copy test.")
    positions: int
    text: str
    versions: dict[str, str]
    date: str


class AllowEntry(RuleModel):
    """Keys may go to 4 bits or fewer for these models, and why."""

    model_type: str | None = Field(None, min_length=1, description="Prefix of model_type.")
    fingerprint: str | None = Field(None, min_length=1, description="One exact model.")
    key_bits: float | None = Field(
        None,
        description="Counts only for keys of this many bits or more, a trellis of 3 as 3.25; null: of any number.",
    )
    calibrated: bool = Field(
        False, description="Counts only where the keys are calibrated, as they were when measured."
    )
    evidence: str = Field(min_length=1, description="What was measured, by whom, with what.")
    measured: Measured | None = Field(None, description="The figures behind the evidence.")

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        if (self.model_type is None) == (self.fingerprint is None):
            raise ValueError("an entry names either a model_type or a fingerprint")
        return self


class Gate(RuleModel):
    """The most that a policy may diverge to be recorded; means in nats."""

    kld: float = Field(gt=0, description="On natural text.")
    copy_kld: float = Field(gt=0, description="On the copy test.")
    positions: int = Field(gt=0, description="The fewest that must be scored on each.")
    source: str = Field(min_length=1, description="Where the numbers come from.")


class Allowlist(RuleModel):
    """policies/allowlist.yaml, and the entries that a machine recorded itself."""

    gate: Gate | None = Field(None, description="Only the shipped file has one.")
    entries: tuple[AllowEntry, ...] = Field(())


@cache
def architectures() -> Architectures:
    """Return the shipped architectures.yaml."""
    return load(shipped("policies") / "architectures.yaml", Architectures)
