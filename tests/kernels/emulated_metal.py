"""Metal kernels on metalshim, and the exact attention that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from daemon.kernels import codec, packing, rotation
from daemon.kernels.case import Case
from daemon.kernels.keys import KeyTransform
from daemon.kernels.proof import Sample
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16, SCHEMES, Scheme
from tests.kernels.float64 import Float, wide
from tests.metalshim import compiler, shim
from tests.metalshim.shim import Settings

# of the largest magnitude: the rounding of the output, and the values of tokens that do not count
TOLERANCE = {mx.float32: 3e-4, mx.float16: 1.2e-3, mx.bfloat16: 8e-3}


@contextmanager
def emulated(mode: str = "ub", order: str = "forward", seed: int = 0) -> Iterator[Settings]:
    """Run Metal kernels on metalshim; whatever was launched must pass the lint of address spaces."""
    with shim.installed(mode, order, seed) as settings:
        yield settings
        for text, name in settings.sources.items():
            assert compiler.lint(text) == (), name


def case(scheme: str, dim: int = 128, **changes: Any) -> Case:
    """Return a case of *scheme* with 4 query heads on 2 KV heads and one float32 query, changed as asked."""
    kinds: Scheme = SCHEMES[scheme]
    plain = Case(
        k=kinds.k,
        v=kinds.v,
        dim_k=dim,
        dim_v=dim,
        n_heads=4,
        n_kv_heads=2,
        queries=1,
        dtype=mx.float32,
    )
    return replace(plain, **changes)


def stretched(given: Sample, *, packed_from: int, packed_to: int, tail: int) -> Sample:
    """Return *given* with other numbers of sinks, packed tokens and newest ones, without a mask."""
    stored = given.stored
    k, v = (
        replace(
            side,
            head=None if side.head is None else _resized(side.head, kept if kind == FP16 else packed_from),
            tail=None if kind == FP16 else _resized(_joined(side), tail),
        )
        for side, kind, kept in (
            (stored.k, stored.layout.k, packed_to + tail),
            (stored.v, stored.layout.v, packed_to + tail),
        )
    )  # fmt: skip
    tiles = stored.tiles
    assert tiles is not None
    other = replace(
        stored,
        length=packed_to + tail,
        packed_from=packed_from,
        packed_to=packed_to,
        tiles=_resized(tiles, -(-packed_to // packing.TILE)),
        k=k,
        v=v,
    )
    return replace(given, stored=other, mask=None)


def _joined(side: Any) -> mx.array:
    return side.joined()


def _resized(array: mx.array, count: int) -> mx.array | None:
    """Return *count* entries along axis 1, repeated as often as need be."""
    times = -(-count // array.shape[1])
    return mx.concatenate([array] * times, axis=1)[:, :count] if count else None


def distance(got: mx.array, expected: Float) -> float:
    """Return the largest difference, over the largest magnitude."""
    numbers = np.array(got.astype(mx.float32), dtype=np.float64)
    return float(np.abs(numbers - expected).max() / np.abs(expected).max())


def exact(given: Sample) -> Float:
    """Return what attention should give, in float64: every stored vector decoded, in the model's own basis."""
    stored = given.stored
    queries = wide(given.queries)
    n_heads, new, dim_k = queries.shape
    n_kv = stored.n_kv_heads
    packed = packing.unpack(stored.tiles_in_use(), stored.layout)
    grouped = queries.reshape(n_kv, -1, dim_k)

    keys = _vectors(stored, "k", packed.k)
    scores = grouped @ keys.swapaxes(1, 2)
    if packed.k is not None and stored.keys is not None:
        scores[..., stored.packed_from : stored.packed_to] += _bias(grouped, stored, stored.keys)
    scores = scores.reshape(n_heads, new, -1) * given.scale
    if given.mask is None:
        position = np.arange(stored.length)
        scores[:, position[None] > position[-new:, None]] = -np.inf
    elif given.mask.dtype == mx.bool_:
        scores = np.where(np.array(given.mask), scores, -np.inf)
    else:
        scores = scores + wide(given.mask)

    largest = scores.max(axis=-1, keepdims=True)
    sink = np.zeros_like(largest)
    if given.sinks is not None:
        logits = wide(given.sinks)[:, None, None]
        largest = np.maximum(largest, logits)
        sink = np.exp(logits - largest)
    weights = np.exp(scores - largest)
    weights /= weights.sum(axis=-1, keepdims=True) + sink
    out: Float = weights.reshape(n_kv, -1, stored.length) @ _vectors(stored, "v", packed.v)
    return out.reshape(n_heads, new, -1)


def _vectors(stored: Stored, side: Any, packed: tuple[mx.array, mx.array] | None) -> Float:
    """Return all vectors of a side, (H, T, dim); packed keys as what multiplies a query that is not scaled."""
    raw = stored.k if side == "k" else stored.v
    if packed is None:
        return wide(raw.joined())
    kind = stored.layout.k if side == "k" else stored.layout.v
    values, factors = codec.decode(*packed, kind)
    matrix = wide(rotation.matrix(values.shape[-1], side))  # Rᵀ: vectors are rows
    plain = (wide(values) * wide(factors)[..., None]) @ matrix.T
    if side == "k" and stored.keys is not None:
        plain = plain * wide(stored.keys.scale)[:, None]
    window = plain[:, stored.packed_from : stored.packed_to]
    parts = [None if raw.head is None else wide(raw.head), window]
    parts.append(None if raw.tail is None else wide(raw.tail))
    return np.concatenate([part for part in parts if part is not None], axis=1)


def _bias(queries: Float, stored: Stored, keys: KeyTransform) -> Float:
    if keys.mean is None:
        return np.zeros(1)
    start, end = stored.packed_positions
    if keys.rotary is None:
        return np.einsum("hnd,hd->hn", queries, wide(keys.mean))[..., None]
    moved = wide(keys.rotary.shift(keys.mean, start, end - start))
    return queries @ moved.swapaxes(1, 2)
