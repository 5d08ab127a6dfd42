"""The catalogue of schemes: how one key or value vector is stored, as data.

A scheme is a pair of codecs, one for keys and one for values. Nothing here computes; the codecs
themselves are in daemon.kernels. The catalogue stands apart so that servers.yaml can be validated
without loading MLX.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

REFERENCE_BITS = 16  # ratios are always quoted against a 16-bit cache
SCALE_BITS = 16  # scales are fp16
AFFINE_GROUPS = (64, 32)  # values of an affine group: the larger one where a head_dim has it


@dataclass(frozen=True, slots=True)
class Codec:
    """How one vector is stored: *bits* per value, and fp16 scales unless it is full precision.

    Most codecs have one scale per vector. An *affine* one has a scale and a bias per group of values. What a
    code of a *trellis* stands for depends on the two codes before it.
    """

    name: str
    bits: float
    scaled: bool = True
    affine: bool = False
    trellis: bool = False

    @property
    def rotated(self) -> bool:
        """Whether vectors are rotated before they are stored; keys then lose their mean before that, too."""
        return self.scaled and not self.affine

    @property
    def precision(self) -> float:
        """The order of codecs by their error, in bits: that of a trellis lies between two widths."""
        return self.bits + 0.25 if self.trellis else self.bits

    def fits(self, head_dim: int) -> bool:
        """Return whether vectors of *head_dim* values can be stored: whole groups, pairs of 3.5 bits, eights of a trellis."""
        if self.affine:
            return any(head_dim % group == 0 for group in AFFINE_GROUPS)
        if self.trellis:
            return head_dim % 8 == 0
        return self.bits * head_dim % 1 == 0

    def group(self, head_dim: int) -> int:
        """Return the values that share scales: a whole vector, or one group of an affine codec.

        Raises:
            ValueError: vectors of *head_dim* values do not divide into groups.
        """
        if not self.affine:
            return head_dim
        for group in AFFINE_GROUPS:
            if head_dim % group == 0:
                return group
        raise ValueError(f"{self.name} stores groups of 32 values: {head_dim} is no multiple of it")

    def scales(self, head_dim: int) -> int:
        """Return how many fp16 numbers are stored beside the codes of one vector."""
        if not self.scaled:
            return 0
        return 2 * head_dim // self.group(head_dim) if self.affine else 1

    def bits_per_value(self, head_dim: int) -> float:
        """Return the bits of one stored value, the scales included."""
        return self.bits + SCALE_BITS * self.scales(head_dim) / head_dim

    def vector_bytes(self, head_dim: int) -> float:
        """Return the bytes of one stored vector of *head_dim* values, the scales included."""
        return self.bits_per_value(head_dim) * head_dim / 8


FP16 = Codec("fp16", REFERENCE_BITS, scaled=False)
INT8 = Codec("int8", 8)
TURBO5 = Codec("turbo5", 5)
TURBO4 = Codec("turbo4", 4)
TURBO3_5 = Codec("turbo3.5", 3.5)  # 11 levels, two values in 7 bits
TRELLIS3 = Codec("trellis3", 3, trellis=True)
TURBO3 = Codec("turbo3", 3)
TURBO2 = Codec("turbo2", 2)
AFFINE8 = Codec("affine8", 8, affine=True)
AFFINE4 = Codec("affine4", 4, affine=True)

_VALUE_CODECS = {
    "0": FP16, "8": INT8, "4": TURBO4, "3.5": TURBO3_5, "3t": TRELLIS3, "3": TURBO3, "2": TURBO2,
}  # fmt: skip
_KEY_CODECS = {**_VALUE_CODECS, "5": TURBO5}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The codecs of keys and values."""

    k: Codec
    v: Codec

    @property
    def name(self) -> str:
        """The canonical spelling: ``fp16``, ``int8``, ``affine8``, ``affine4`` or ``turbo<K>v<V>``."""
        if self.k == self.v and self.k in (FP16, INT8, AFFINE8, AFFINE4):
            return self.k.name
        return f"turbo{_digit(self.k)}v{_digit(self.v)}"

    @property
    def mixed(self) -> bool:
        """Whether an affine codec stands beside another one: affine schemes are whole, so that is none."""
        return self.k != self.v and (self.k.affine or self.v.affine)

    @property
    def low_bit_keys(self) -> bool:
        """Whether keys have 4 bits or fewer, which only allow-listed models may use."""
        return self.k.bits <= 4

    def fits(self, head_dim_k: int, head_dim_v: int) -> bool:
        """Return whether both codecs can store vectors of these lengths."""
        return self.k.fits(head_dim_k) and self.v.fits(head_dim_v)

    def bits_per_value(self, head_dim_k: int, head_dim_v: int) -> float:
        """Return the mean bits over keys and values, scales included."""
        total = self.k.vector_bytes(head_dim_k) + self.v.vector_bytes(head_dim_v)
        return total * 8 / (head_dim_k + head_dim_v)


def _digit(codec: Codec) -> str:
    if codec is FP16:
        return "0"
    return f"{codec.bits:g}t" if codec.trellis else f"{codec.bits:g}"


SCHEMES: dict[str, Scheme] = {
    f"turbo{k}v{v}": Scheme(key, value)
    for k, key in _KEY_CODECS.items()
    for v, value in _VALUE_CODECS.items()
}
SCHEMES["fp16"] = SCHEMES.pop("turbo0v0")
SCHEMES["int8"] = SCHEMES["turbo8v8"]
SCHEMES["affine8"] = Scheme(AFFINE8, AFFINE8)
SCHEMES["affine4"] = Scheme(AFFINE4, AFFINE4)

# What a hint lists instead of 58 names.
_FORMS = (
    f"turbo<K>v<V> (K {' '.join(sorted(_KEY_CODECS))}, V {' '.join(sorted(_VALUE_CODECS))}),"
    " fp16, int8, affine8, affine4"
)

ALIASES = {
    "f16": "fp16",
    "none": "fp16",
    "turbo0v0": "fp16",
    "fp16+turbo4": "turbo0v4",
    "turbo4-asym": "turbo0v4",
    "fp16+turbo3": "turbo0v3",
    "turbo3-asym": "turbo0v3",
    "turbo3": "turbo0v3",
    "turbo4": "turbo4v4",
    "turbo4-sym": "turbo4v4",
    "turbo4-delegated": "turbo0v4",
    "turbo3.5": "turbo3v4",
}


@dataclass(frozen=True, slots=True)
class Window:
    """The tail that a name brings along: tokens kept in full precision, and how many leave at a time."""

    tail_tokens: int
    fold_tokens: int


DEFAULT_WINDOW = Window(tail_tokens=32, fold_tokens=32)
_WINDOWS = {"turbo4-delegated": Window(tail_tokens=256, fold_tokens=128)}


def window_of(name: str | None) -> Window | None:
    """Return the window that the scheme or cache type *name* brings along; None: it brings none."""
    return _WINDOWS.get(name.lower()) if name is not None else None


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
    "turbo4-delegated": (FP16, TURBO4),
    "turbo3": (FP16, TURBO3),
    "turbo3-asym": (FP16, TURBO3),
}

VALUE_CODEC_NAMES: dict[str, Codec] = {
    "fp16": FP16,
    "f16": FP16,
    "int8": INT8,
    "turbo4": TURBO4,
    "turbo3.5": TURBO3_5,
    "trellis3": TRELLIS3,
    "turbo3": TURBO3,
    "turbo2": TURBO2,
    "affine8": AFFINE8,
    "affine4": AFFINE4,
}
KEY_CODEC_NAMES: dict[str, Codec] = {**VALUE_CODEC_NAMES, "turbo5": TURBO5}


class UnknownSchemeError(ValueError):
    """A scheme name that this build cannot serve; *hint* says what to write instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def parse_scheme(name: str) -> Scheme:
    """Return the scheme that *name* means, aliases included.

    Raises:
        UnknownSchemeError: *name* is no scheme, is GGML's, or is ambiguous.
    """
    key = name.lower()
    key = ALIASES.get(key, key)
    if key in SCHEMES:
        return SCHEMES[key]
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
    raise UnknownSchemeError(f'unknown scheme "{name}"', f"{suggestion}one of {_FORMS}")


def parse_codec(name: str, side: str) -> Codec:
    """Return the codec that *name* means for one *side* (``k`` or ``v``) of a policy.

    Raises:
        UnknownSchemeError: *name* is no codec.
    """
    key = name.lower()
    known = KEY_CODEC_NAMES if side == "k" else VALUE_CODEC_NAMES
    if key in known:
        return known[key]
    if key in _GGML:
        nearest = SCHEMES[_GGML[key]]
        codec = nearest.k if side == "k" else nearest.v
        raise UnknownSchemeError(
            f'"{name}" is a GGML name, not a codec of tqd',
            f"the nearest for {side} is {codec.name}",
        )
    raise UnknownSchemeError(f'unknown codec "{name}" for {side}', f"one of {', '.join(known)}")


def parse_cache_type(name: str, side: str) -> Codec:
    """Return the codec that mlxcel's ``cache_type_<side>: name`` means.

    Raises:
        UnknownSchemeError: *name* is no cache type.
    """
    key = name.lower()
    if key in CACHE_TYPES:
        return CACHE_TYPES[key][0 if side == "k" else 1]
    if key in _GGML:
        raise UnknownSchemeError(
            f'"{name}" is a GGML name, not a cache type of tqd', f"one of {', '.join(CACHE_TYPES)}"
        )
    raise UnknownSchemeError(f'unknown cache type "{name}"', f"one of {', '.join(CACHE_TYPES)}")
