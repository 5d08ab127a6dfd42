"""The catalogue of schemes: how one key or value vector is stored, as data.

A scheme is a pair of codecs, one for keys and one for values. Nothing here computes; the codecs
themselves are in daemon.kernels. The catalogue stands apart so that servers.yaml can be validated
without loading MLX.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

REFERENCE_BITS = 16  # ratios are always quoted against a 16-bit cache
SCALE_BITS = 16  # one fp16 scale per vector, per head


@dataclass(frozen=True, slots=True)
class Codec:
    """How one vector is stored: *bits* per value, plus one fp16 scale unless it is full precision."""

    name: str
    bits: float
    scaled: bool = True

    def bits_per_value(self, head_dim: int) -> float:
        """Return the bits of one stored value, the scale included."""
        return self.bits + (SCALE_BITS / head_dim if self.scaled else 0.0)

    def vector_bytes(self, head_dim: int) -> float:
        """Return the bytes of one stored vector of *head_dim* values, the scale included."""
        return self.bits_per_value(head_dim) * head_dim / 8


FP16 = Codec("fp16", REFERENCE_BITS, scaled=False)
INT8 = Codec("int8", 8)
TURBO4 = Codec("turbo4", 4)
TURBO3 = Codec("turbo3", 3)
TURBO2 = Codec("turbo2", 2)

_KEY_CODECS = {"0": FP16, "8": INT8, "4": TURBO4, "3": TURBO3, "2": TURBO2}
_VALUE_CODECS = {"0": FP16, "8": INT8, "4": TURBO4, "3": TURBO3, "2": TURBO2}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The codecs of keys and values."""

    k: Codec
    v: Codec

    @property
    def name(self) -> str:
        """The canonical spelling: ``fp16``, ``int8`` or ``turbo<K>v<V>``."""
        if self.k is FP16 and self.v is FP16:
            return "fp16"
        if self.k is INT8 and self.v is INT8:
            return "int8"
        return f"turbo{_digit(self.k)}v{_digit(self.v)}"

    @property
    def low_bit_keys(self) -> bool:
        """Whether keys have 4 bits or fewer, which only allow-listed models may use."""
        return self.k.bits <= 4

    def bits_per_value(self, head_dim_k: int, head_dim_v: int) -> float:
        """Return the mean bits over keys and values, scales included."""
        total = self.k.vector_bytes(head_dim_k) + self.v.vector_bytes(head_dim_v)
        return total * 8 / (head_dim_k + head_dim_v)


def _digit(codec: Codec) -> str:
    return "0" if codec is FP16 else f"{codec.bits:g}"


SCHEMES: dict[str, Scheme] = {
    f"turbo{k}v{v}": Scheme(key, value)
    for k, key in _KEY_CODECS.items()
    for v, value in _VALUE_CODECS.items()
}
SCHEMES["fp16"] = SCHEMES.pop("turbo0v0")
SCHEMES["int8"] = SCHEMES["turbo8v8"]

ALIASES = {
    "f16": "fp16",
    "none": "fp16",
    "fp16+turbo4": "turbo0v4",
    "turbo4-asym": "turbo0v4",
    "fp16+turbo3": "turbo0v3",
    "turbo3-asym": "turbo0v3",
    "turbo3": "turbo0v3",
    "turbo4": "turbo4v4",
    "turbo4-sym": "turbo4v4",
}

# Spellings that name a scheme of a later step: refused with "not yet available" instead of "unknown".
_NOT_YET_DIGITS = {"5", "3.5"}
NOT_YET = frozenset(
    {
        f"turbo{k}v{v}"
        for k in ("0", "8", "5", "4", "3.5", "3", "2")
        for v in ("8", "4", "3.5", "3", "2", "0")
        if k in _NOT_YET_DIGITS or v in _NOT_YET_DIGITS
    }
    | {"affine8", "affine4", "turbo4-delegated", "turbo3.5"}
)

# GGML's names mean block formats that tqd does not have; the nearest scheme by bits is the hint.
_GGML = {
    "q8_0": "int8", "q8_1": "int8", "q6_k": "int8", "q5_0": "turbo8v4", "q5_1": "turbo8v4", "q5_k": "turbo8v4",
    "q4_0": "turbo4v4", "q4_1": "turbo4v4", "q4_k": "turbo4v4", "iq4_nl": "turbo4v4", "q3_k": "turbo0v3", "q2_k": "turbo8v2",
    "bf16": "fp16", "f32": "fp16",
}  # fmt: skip

# mlxcel's --cache-type-k / --cache-type-v: one name a side; K and V of the pair each names.
CACHE_TYPES: dict[str, tuple[Codec, Codec]] = {
    "fp16": (FP16, FP16),
    "f16": (FP16, FP16),
    "int8": (INT8, INT8),
    "turbo4": (TURBO4, TURBO4),
    "turbo4-asym": (FP16, TURBO4),
    "turbo3": (FP16, TURBO3),
    "turbo3-asym": (FP16, TURBO3),
}

KEY_CODEC_NAMES = {
    "fp16": FP16,
    "f16": FP16,
    "int8": INT8,
    "turbo4": TURBO4,
    "turbo3": TURBO3,
    "turbo2": TURBO2,
}
VALUE_CODEC_NAMES = KEY_CODEC_NAMES


class UnknownSchemeError(ValueError):
    """A scheme name that this build cannot serve; *hint* says what to write instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def parse_scheme(name: str) -> Scheme:
    """Return the scheme that *name* means, aliases included.

    Raises:
        UnknownSchemeError: *name* is no scheme, is GGML's, is ambiguous, or is of a later step.
    """
    key = name.lower()
    key = ALIASES.get(key, key)
    if key in SCHEMES:
        return SCHEMES[key]
    if key in NOT_YET:
        raise UnknownSchemeError(
            f'scheme "{name}" is not yet available', f"available now: {', '.join(sorted(SCHEMES))}"
        )
    if key in _GGML:
        raise UnknownSchemeError(
            f'"{name}" is a GGML name, not a scheme of tqd', f"the nearest scheme is {_GGML[key]}"
        )
    if key == "turbo2":
        raise UnknownSchemeError(
            '"turbo2" does not say which side has 2 bits', "write turbo2v2, turbo8v2 or turbo0v2"
        )
    close = difflib.get_close_matches(key, [*SCHEMES, *ALIASES], n=1)
    suggestion = f'did you mean "{close[0]}"? ' if close else ""
    raise UnknownSchemeError(
        f'unknown scheme "{name}"', f"{suggestion}one of {', '.join(sorted(SCHEMES))}"
    )


def parse_codec(name: str, side: str) -> Codec:
    """Return the codec that *name* means for one *side* (``k`` or ``v``) of a policy.

    Raises:
        UnknownSchemeError: *name* is no codec.
    """
    key = name.lower()
    if key in KEY_CODEC_NAMES:
        return KEY_CODEC_NAMES[key]
    if key in _GGML:
        nearest = SCHEMES[_GGML[key]]
        codec = nearest.k if side == "k" else nearest.v
        raise UnknownSchemeError(
            f'"{name}" is a GGML name, not a codec of tqd',
            f"the nearest for {side} is {codec.name}",
        )
    raise UnknownSchemeError(
        f'unknown codec "{name}" for {side}', f"one of {', '.join(KEY_CODEC_NAMES)}"
    )


def parse_cache_type(name: str, side: str) -> Codec:
    """Return the codec that mlxcel's ``cache_type_<side>: name`` means.

    Raises:
        UnknownSchemeError: *name* is no cache type.
    """
    key = name.lower()
    if key in CACHE_TYPES:
        return CACHE_TYPES[key][0 if side == "k" else 1]
    if key == "turbo4-delegated":
        raise UnknownSchemeError(
            'cache type "turbo4-delegated" is not yet available', f"one of {', '.join(CACHE_TYPES)}"
        )
    if key in _GGML:
        raise UnknownSchemeError(
            f'"{name}" is a GGML name, not a cache type of tqd', f"one of {', '.join(CACHE_TYPES)}"
        )
    raise UnknownSchemeError(f'unknown cache type "{name}"', f"one of {', '.join(CACHE_TYPES)}")
