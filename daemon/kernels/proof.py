"""Proof that a device's kernels work on it: a small random case through them and through the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import mlx.core as mx

from daemon.kernels import codec, packing, reference
from daemon.kernels.case import Attend, Case
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.kernels.packing import TILE, Packed
from daemon.kernels.rotation import Side
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import FP16, Codec

# Largest |difference| over the largest magnitude. Kernels may split a float32 query into two bytes (2⁻¹⁴ a product),
# and round their output once.
_TOLERANCE = {mx.float32: 2e-3, mx.float16: 4e-3, mx.bfloat16: 2e-2}

_SINKS = 4
_PACKED_TO = (
    6 * TILE + 11
)  # a tile that is partly filled, and more tiles than a small launch has parts
_CAPACITY = 8  # tiles, one of them spare
_TAIL = 37
_DROPPED = 2 * TILE  # as if a token budget had taken some out


@dataclass(frozen=True, slots=True)
class Sample:
    """The arguments of one call of `attend`."""

    queries: mx.array
    stored: Stored
    scale: float
    mask: mx.array | None
    sinks: mx.array | None

    def run(self, attend: Attend) -> mx.array:
        """Return what *attend* gives, computed."""
        out = attend.attend(self.queries, self.stored, self.scale, self.mask, self.sinks)
        mx.eval(out)
        return out


def problem(kernels: Attend, case: Case) -> str | None:
    """Return what is wrong with *kernels* on *case*, as the end of a sentence that begins with them; None: nothing.

    Raises whatever the kernels raise.
    """
    return _problem(kernels, case, 0) or _problem(kernels, case, 1)


def _problem(kernels: Attend, case: Case, seed: int) -> str | None:
    given = sample(case, seed)
    return difference(given.run(kernels), given.run(reference), case)


def difference(got: mx.array, expected: mx.array, case: Case) -> str | None:
    """Return how *got* is not what the reference gave for *case*, as problem does."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"return {got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}"
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    if not mx.all(mx.isfinite(got)).item():
        return "give numbers that are not finite on this device"
    distance = cast("float", (mx.max(mx.abs(got - expected)) / mx.max(mx.abs(expected))).item())
    if distance > _TOLERANCE[case.dtype]:
        return f"disagree with the reference on this device (by {distance:.2%})"
    return None


def sample(case: Case, seed: int = 0) -> Sample:
    """Return arguments that make *case*: sinks, tiles of which the last is partly filled, a tail, dropped tokens.

    Slots of tiles that hold no token are full of other vectors, as they are after a trim. Odd seeds rotate
    neighbouring channels as GPT-J does, and only half of them; even ones all, as a llama does.
    """
    layout = packing.native_layout(case.k, case.v, case.dim_k, case.dim_v)
    random = mx.random.key(seed)
    k_key, v_key, q_key, mask_key, sink_key, mean_key = mx.random.split(random, 6)
    length = _PACKED_TO + _TAIL
    k, v = _side(case, case.k, case.dim_k, "k", k_key), _side(case, case.v, case.dim_v, "v", v_key)
    stored = Stored(
        layout=layout,
        length=length,
        packed_from=_SINKS,
        packed_to=_PACKED_TO,
        tiles=packing.pack(Packed(k[1], v[1]), layout),
        k=k[0],
        v=v[0],
        n_kv_heads=case.n_kv_heads,
        dropped=_DROPPED,
        keys=_transform(case, mean_key, traditional=seed % 2 == 1),
    )
    shape = (case.n_heads, case.queries, case.dim_k)
    return Sample(
        queries=mx.random.normal(shape, key=q_key).astype(case.dtype),
        stored=stored,
        scale=case.dim_k**-0.5,
        mask=_mask(case, length, mask_key),
        sinks=mx.random.normal((case.n_heads,), key=sink_key).astype(case.dtype)
        if case.learned_sinks
        else None,
    )


def _side(
    case: Case, kind: Codec, dim: int, side: Side, key: mx.array
) -> tuple[RawSide, tuple[mx.array, mx.array] | None]:
    """Return the vectors of one side in full precision, and the codes and scales of the others."""
    plain = mx.random.normal((case.n_kv_heads, _PACKED_TO + _TAIL, dim), key=key).astype(case.dtype)
    if kind == FP16:
        return RawSide(head=plain, tail=None), None
    other = mx.random.normal((case.n_kv_heads, _CAPACITY * TILE, dim), key=key)
    return (
        RawSide(head=plain[:, :_SINKS], tail=plain[:, _PACKED_TO:]),
        codec.encode(other, kind, side),
    )


def _transform(case: Case, key: mx.array, *, traditional: bool) -> KeyTransform | None:
    if not case.scaled_keys:
        return None
    shape = (case.n_kv_heads, case.dim_k)
    scale_key, mean_key = mx.random.split(key)
    scale = mx.exp(0.3 * mx.random.normal(shape, key=scale_key))
    mean = None if case.key_mean == "none" else mx.random.normal(shape, key=mean_key)
    rotary = None
    if case.key_mean == "rotary":
        turning = case.dim_k // 4 * 2 if traditional else case.dim_k // 2 * 2
        rope = partial(mx.fast.rope, dims=turning, traditional=traditional, base=1e4, scale=1.0)
        rotary = Rotary(rope, case.dim_k)
    return KeyTransform(scale, mean, rotary)


def _mask(case: Case, length: int, key: mx.array) -> mx.array | None:
    """Return a causal mask with holes in it, or the same as numbers to add, a head's own each."""
    if case.mask == "none":
        return None
    newest = mx.arange(length - case.queries, length)[:, None]
    causal = newest >= mx.arange(length)[None]
    if case.mask == "boolean":
        itself = newest == mx.arange(length)[None]
        return (causal & (mx.random.uniform(shape=causal.shape, key=key) < 0.7)) | itself
    numbers = mx.random.normal((case.n_heads, *causal.shape), key=key)
    return mx.where(causal, numbers, -mx.inf).astype(case.dtype)
