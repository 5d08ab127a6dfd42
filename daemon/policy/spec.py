"""The `kv:` block of servers.yaml and of a named policy, as frozen models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from daemon.units import Size


class FrozenModel(BaseModel):
    """Base of every model that a user's file becomes: closed, immutable, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def later(default: Any, description: str, **kwargs: Any) -> Any:
    """Return a field whose feature is not built yet: its default is accepted, anything else is refused."""
    return Field(
        default, description=description, json_schema_extra={"not_yet_available": True}, **kwargs
    )


Match = str | list[int]


class CalibrationSource(FrozenModel):
    """What to calibrate on instead of the text that Python brings along: one of the two."""

    text: str | None = Field(
        None, description="Path of a UTF-8 text; a few thousand words are enough."
    )
    profile: str | None = Field(None, description="Path of a calibration profile of this model.")

    @model_validator(mode="after")
    def _one_of_two(self) -> CalibrationSource:
        if (self.text is None) == (self.profile is None):
            raise ValueError("write either text or profile")
        return self


Calibration = Literal["auto", "none"] | CalibrationSource
Compress = Literal["chunk", "first_decode"]


class LayerRule(FrozenModel):
    """One entry of `kv.layers`: what the matching layers get instead."""

    match: Match = Field(
        description='Which layers: all | full | sliding | "0-3" | "first:2" | "last:2" | [0, 5, 9]; indices as `tqd check` prints them.'
    )
    mode: str | None = Field(None, description="Scheme of these layers.")
    k: str | None = Field(None, description="Codec of these layers' keys.")
    v: str | None = Field(None, description="Codec of these layers' values.")
    sink_tokens: Annotated[int, Field(ge=0, le=4096)] | None = Field(
        None, description="First tokens kept in full precision."
    )
    tail_tokens: Annotated[int, Field(ge=0, le=65536)] | None = Field(
        None, description="Newest tokens kept in full precision."
    )
    fold_tokens: Annotated[int, Field(ge=32, le=65536)] | None = Field(
        None, description="Tokens that leave the tail together; a multiple of 32."
    )
    token_budget: Annotated[int, Field(ge=32)] | None = Field(
        None,
        description="Keep the sinks and the newest tokens of this layer, this many in all, drop the middle (lossy); a multiple of 32.",
    )


class KvSpec(FrozenModel):
    """The KV policy of one server, as written: None means "take it from the named policy"."""

    policy: str = Field(
        "balanced",
        description="A named policy, shipped or from a folder policies/ beside servers.yaml.",
    )
    mode: str | None = Field(None, description="Scheme of keys and values; overrides the policy's.")
    k: str | None = Field(None, description="Codec of keys; overrides mode.")
    v: str | None = Field(None, description="Codec of values; overrides mode.")
    cache_type_k: str | None = Field(
        None,
        description="Codec of keys in mlxcel's spelling; wins over k and mode, with a warning.",
    )
    cache_type_v: str | None = Field(
        None,
        description="Codec of values in mlxcel's spelling; wins over v and mode, with a warning.",
    )
    boundary_v: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="First N and last N eligible attention layers keep V at boundary_mode; clamped to half.",
    )
    boundary_mode: Literal["int8", "fp16"] | None = Field(
        None, description="Codec of boundary layers."
    )
    boundary_k: Literal["auto"] | Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="As boundary_v, for keys; auto acts only where architectures.yaml asks for it.",
    )
    sink_tokens: Annotated[int, Field(ge=0, le=4096)] | None = Field(
        None, description="First tokens of a sequence kept in full precision."
    )
    tail_tokens: Annotated[int, Field(ge=0, le=65536)] | None = Field(
        None, description="Newest tokens kept in full precision."
    )
    fold_tokens: Annotated[int, Field(ge=32, le=65536)] | None = Field(
        None, description="Tokens that leave the tail together; a multiple of 32."
    )
    calibration: Calibration | None = Field(
        None,
        description="auto | none | {text: path} | {profile: path}; statistics of the keys, measured once per model.",
    )
    budget: Literal["auto", "none"] | Size = Field(
        "auto",
        description="Bytes for all live KV of this server | auto (its share of the memory plan) | none (not limited: all of it is planned for).",
    )
    compress: Compress | None = Field(
        None,
        description="When prompt tokens are packed: at the end of each prefill chunk, or, of a prompt of up to 2048 tokens, at the first decode step.",
    )
    strict: bool | None = Field(
        None,
        description="A layer that cannot have its requested scheme is an error, not a fallback.",
    )
    layers: tuple[LayerRule, ...] | None = Field(
        None, description="Rules for some layers; later rules win.", strict=False
    )


class NamedPolicy(FrozenModel):
    """One file of policies/: a kv block with a description and the source of its numbers."""

    description: str = Field(min_length=1, description="What the policy is for, in a sentence.")
    source: str = Field(min_length=1, description="Where its numbers come from.")
    bits_per_value: dict[int, float] = Field(
        description="Bits per value at head_dim 64, 128, 256, scales included.", strict=False
    )
    mode: str
    boundary_v: Annotated[int, Field(ge=0)] = 0
    boundary_mode: Literal["int8", "fp16"] = "int8"
    boundary_k: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    sink_tokens: Annotated[int, Field(ge=0, le=4096)] = 4
    tail_tokens: Annotated[int, Field(ge=0, le=65536)] | None = None
    fold_tokens: Annotated[int, Field(ge=32, le=65536)] | None = None
    compress: Compress = "chunk"
    strict: bool = False
    layers: tuple[LayerRule, ...] = Field((), strict=False)


class KvRequest(FrozenModel):
    """What a server asks for once the named policy and its own keys are merged; nothing is None any more.

    This is what the supervisor hands to a worker: the worker needs no policies folder.
    """

    policy: str
    k: str
    v: str
    explicit: bool = Field(
        description="The scheme was written in servers.yaml, not taken from the named policy."
    )
    boundary_v: int
    boundary_mode: Literal["int8", "fp16"]
    boundary_k: Literal["auto"] | int
    sink_tokens: int
    tail_tokens: int
    fold_tokens: int = 32
    compress: Compress = "chunk"
    strict: bool
    calibration: Calibration = "auto"
    layers: tuple[LayerRule, ...] = Field((), strict=False)
    warnings: tuple[str, ...] = Field((), strict=False)
