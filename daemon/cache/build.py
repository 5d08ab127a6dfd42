"""From a resolved policy to the caches of a model, and the proof at load time that they work.

mlx-lm asks a model for its caches through `make_cache`. We ask it too, keep what cannot be packed
(rotating, recurrent, composite caches), and put ours where the model wants a plain growing KV cache
and the policy packs it. `probe` then runs a few tokens through both kinds and falls back to mlx-lm's
own caches, with a reason, where they disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.kernels.keys import KeyTransform
from daemon.policy.resolve import LayerPlan
from daemon.policy.schemes import REFERENCE_BITS, SCHEMES, Scheme

PROBE_TOKENS = 6
PACKED_PROBE_TOKENS = 80  # past 4 sinks and a tail of 32, so that tiles are attended to
# Largest |difference| of logits over their largest magnitude, by dtype: the same attention in another order of
# operations. Measured on llama, qwen3 and gemma3 shapes it stays a factor of ten below.
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 8e-2}

Caches = list[Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """One cache of a model, in mlx-lm's order: the layer it belongs to, and our row policy or None for mlx-lm's own."""

    plan: LayerPlan
    packed: bool
    keys: KeyTransform | None = None
    statistics_id: str | None = None

    def row(self, scheme: Scheme | None = None) -> Row:
        """Return an empty row under the plan, or with *scheme* and every token instead."""
        return Row(
            scheme or self.plan.effective,
            sink_tokens=self.plan.sink_tokens,
            tail_tokens=self.plan.tail_tokens,
            token_budget=None if scheme else self.plan.token_budget,
            keys=self.keys,
            statistics_id=self.statistics_id,
        )


class CacheFactory:
    """Makes the caches of a new sequence; installed as the model's `make_cache`."""

    def __init__(self, stock: Callable[[], Caches], slots: Sequence[Slot]) -> None:
        self._stock = stock
        self.slots = tuple(slots)

    def __call__(self) -> Caches:
        """Return one cache for each slot, empty."""
        return self._make(Slot.row)

    def stock(self) -> Caches:
        """Return mlx-lm's own caches."""
        return self._stock()

    def unpacked(self) -> Caches:
        """Return our caches with every layer in full precision: what the probe compares with mlx-lm's own."""
        return self._make(lambda slot: slot.row(SCHEMES["fp16"]))

    @property
    def plans(self) -> tuple[LayerPlan, ...]:
        """The plan of every slot, in order."""
        return tuple(slot.plan for slot in self.slots)

    @property
    def any_packed(self) -> bool:
        """Whether one of the caches is ours."""
        return any(slot.packed for slot in self.slots)

    @property
    def any_scaled_keys(self) -> bool:
        """Whether the keys of some layer get packed."""
        return any(slot.packed and slot.plan.effective.k.scaled for slot in self.slots)

    def calibrated(
        self, keys: Mapping[int, KeyTransform], statistics_id: str | None
    ) -> CacheFactory:
        """Return a factory whose slots take off their keys what *keys* has for their index."""
        slots = [
            replace(
                slot, keys=keys.get(index), statistics_id=statistics_id if index in keys else None
            )
            for index, slot in enumerate(self.slots)
        ]
        return CacheFactory(self._stock, slots)

    def fall_back(self, reason: str) -> CacheFactory:
        """Return a factory of mlx-lm's own caches only; every packed slot carries *reason*."""
        slots = [
            Slot(_unpacked(slot.plan, reason), packed=False) if slot.packed else slot
            for slot in self.slots
        ]
        return CacheFactory(self._stock, slots)

    def _make(self, row_of: Callable[[Slot], Row]) -> Caches:
        return [
            SequenceCache(row_of(slot)) if slot.packed else stock
            for slot, stock in zip(self.slots, self._stock(), strict=True)
        ]


def plan_caches(model: Any, plans: Sequence[LayerPlan]) -> CacheFactory:
    """Return the factory of *model*'s caches under *plans*, one plan for each layer that holds a cache.

    A model that uses its layers several times (loops) has a multiple of that number of caches, in order.
    """
    stock = getattr(model, "make_cache", None) or (lambda: [KVCache() for _ in model.layers])
    return CacheFactory(stock, plan_slots(stock(), plans))


def plan_slots(made: Sequence[Any], plans: Sequence[LayerPlan]) -> list[Slot]:
    """Return what becomes of each of the caches *made* by a model under *plans*, as plan_caches does."""
    repeats, rest = divmod(len(made), max(len(plans), 1))
    if rest:
        reason = f"the model makes {len(made)} caches for {len(plans)} layers"
        return [Slot(_unpacked(_filler(plans, i), reason), packed=False) for i in range(len(made))]
    slots = []
    for plan, cache in zip(list(plans) * repeats, made, strict=True):
        wanted = plan.effective != SCHEMES["fp16"] or plan.token_budget is not None
        if wanted and type(cache) is not KVCache:
            slots.append(
                Slot(
                    _unpacked(plan, f"the model keeps it in a {type(cache).__name__}"), packed=False
                )
            )
        else:
            slots.append(Slot(plan, packed=wanted))
    # boundary layers in full precision share the mask of packed layers of their kind: they must be ours too
    if any(slot.packed for slot in slots):
        slots = [
            Slot(
                slot.plan,
                packed=slot.packed or (type(cache) is KVCache and slot.plan.kind == "full"),
            )
            for slot, cache in zip(slots, made, strict=True)
        ]
    return slots


def _filler(plans: Sequence[LayerPlan], index: int) -> LayerPlan:
    return plans[min(index, len(plans) - 1)]


def _unpacked(plan: LayerPlan, reason: str) -> LayerPlan:
    if plan.effective == SCHEMES["fp16"] and plan.token_budget is None:
        return plan
    return replace(plan, effective=SCHEMES["fp16"], token_budget=None, reason=reason)


def convert(caches: Sequence[Any], row_of: Callable[[int], Row | None]) -> Caches:
    """Return *caches* with plain growing ones packed; the given ones are left as they are.

    Args:
        caches: mlx-lm's own caches of one model, empty or filled.
        row_of: gives an empty row for the cache at an index; None keeps that cache.

    Returns:
        a SequenceCache for each cache that becomes a row, or a BatchCache where it holds several sequences.

    Raises:
        ValueError: there is a row for a cache that is no plain KVCache.
    """
    return [
        cache if (row := row_of(index)) is None else _converted(cache, row, index)
        for index, cache in enumerate(caches)
    ]


def _converted(cache: Any, row: Row, index: int) -> SequenceCache | BatchCache:
    if type(cache) is not KVCache:
        raise ValueError(f"cache {index} is a {type(cache).__name__}; only a KVCache can be packed")
    if cache.empty():
        return SequenceCache(row)
    keys, values = cache.keys_and_values()
    rows = [row.fresh() for _ in range(keys.shape[0])]
    for each, k, v in zip(rows, keys, values, strict=True):
        each.append(k, v)
        each.pack()
    return SequenceCache(rows[0]) if len(rows) == 1 else BatchCache(rows)


def probe(model: Any, factory: CacheFactory, vocab_size: int) -> CacheFactory:
    """Run *model* on its own caches and on ours; return *factory*, or one that falls back with the reason.

    Raises nothing: a model on which our caches fail still serves, on mlx-lm's own.
    """
    if not factory.any_packed:
        return factory
    try:
        expected = _two_passes(model, factory.stock(), PROBE_TOKENS, vocab_size)
        got = _two_passes(model, factory.unpacked(), PROBE_TOKENS, vocab_size)
        difference = _relative_difference(got, expected)
        tolerance = _TOLERANCE.get(expected.dtype, 8e-2)
        if not difference <= tolerance:
            return factory.fall_back(
                f"its attention does not go through the cache (logits differ by {difference:.1%})"
            )
        packed = _two_passes(model, factory(), PACKED_PROBE_TOKENS, vocab_size)
        if not mx.all(mx.isfinite(packed)).item():
            return factory.fall_back("packed keys and values gave infinite logits")
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises on a view means "not with this model"
        return factory.fall_back(
            f"its code needs plain keys and values ({type(error).__name__}: {error})"
        )
    return factory


def _relative_difference(got: mx.array, expected: mx.array) -> float:
    scale = mx.maximum(mx.max(mx.abs(expected.astype(mx.float32))), 1e-6)
    return float(cast("float", (mx.max(mx.abs(got - expected).astype(mx.float32)) / scale).item()))


def _two_passes(model: Any, caches: Caches, prefill: int, vocab_size: int) -> mx.array:
    """Return the logits of the last prefill token and of one decode step, (2, vocab)."""
    tokens = (mx.arange(prefill + 1) * 7919 + 11) % vocab_size
    first = model(tokens[None, :prefill], cache=caches)[0, -1]
    second = model(tokens[None, prefill:], cache=caches)[0, -1]
    logits = mx.stack([first, second])
    mx.eval(logits)
    return logits


@dataclass(frozen=True, slots=True)
class BytesPerToken:
    """Bytes that one more token costs once it is packed, over all layers that keep every token."""

    effective: float
    fp16: float


def measure(model: Any, factory: CacheFactory, vocab_size: int) -> BytesPerToken:
    """Measure the bytes of a stored token on real buffers, layer by layer, and the same in a 16-bit cache."""
    caches = factory()
    model(mx.zeros((1, PROBE_TOKENS), dtype=mx.int32) % vocab_size, cache=caches)
    effective = fp16 = 0.0
    for cache in caches:
        if isinstance(cache, SequenceCache) and cache.row.token_budget is None:
            (n_heads, dim_k), (_, dim_v) = cache.row.shapes()
            effective += _packed_bytes(cache.row, n_heads, dim_k, dim_v)
            fp16 += n_heads * (dim_k + dim_v) * REFERENCE_BITS / 8
        elif type(cache) is KVCache and cache.keys is not None:
            for side in (cache.keys, cache.values):
                effective += side.nbytes / side.shape[2]
                fp16 += side.size / side.shape[2] * REFERENCE_BITS / 8
    return BytesPerToken(effective, fp16)


def _packed_bytes(row: Row, n_heads: int, dim_k: int, dim_v: int) -> float:
    """Return the bytes by which a row like *row* grows per token, between two lengths that are whole tiles apart."""
    scratch = row.fresh()
    dtype = getattr(mx, row.dtype)
    tokens = 512 + row.tail_tokens  # a multiple of a tile, so that both lengths leave the same tail
    used = []
    for _ in range(2):
        scratch.append(
            mx.zeros((n_heads, tokens, dim_k), dtype=dtype),
            mx.zeros((n_heads, tokens, dim_v), dtype=dtype),
        )
        scratch.pack()
        used.append((scratch.used_bytes, scratch.packed_tokens))
    (bytes_before, tokens_before), (bytes_after, tokens_after) = used
    return (bytes_after - bytes_before) / (tokens_after - tokens_before)
