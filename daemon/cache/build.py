"""From a resolved policy to the caches of a model, and the proof at load time that they work.

mlx-lm asks a model for its caches through `make_cache`. We ask it too, keep what cannot be packed
(rotating and recurrent caches), and put ours where the model wants a plain growing KV cache and the
policy packs it, also inside a composite cache. `probe` then runs a few tokens through both kinds and
falls back to mlx-lm's own caches, with a reason, where they disagree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from daemon.cache.alone import alone
from daemon.cache.latent import BatchLatentCache, LatentCache
from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.errors import first_line
from daemon.kernels.attention import REFERENCE
from daemon.kernels.case import Attend
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE
from daemon.policy.architecture import LayerKind
from daemon.policy.resolved import LayerPlan
from daemon.policy.rules import Batching
from daemon.policy.schemes import SCHEMES, Scheme

PROBE_TOKENS = 6
PROBE_SINKS = 4
PACKED_PROBE_TOKENS = 80  # past the sinks and a tail of 32, so that tiles are attended to
# Largest |difference| of logits over their largest magnitude, by dtype: the same attention in another order of
# operations. On the tiny models of every family it is exactly zero in float32.
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 8e-2}

EXACT = SCHEMES["fp16"]

Caches = list[Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """One cache of a model, in mlx-lm's order: the layer it belongs to, and whether it is ours or mlx-lm's own.

    Where mlx-lm keeps several caches of a layer in a CacheList, *members* are the positions in it that
    are ours; empty: the cache is not composite.
    """

    plan: LayerPlan
    packed: bool
    members: tuple[int, ...] = ()
    keys: KeyTransform | None = None
    statistics_id: str | None = None

    @property
    def calibratable(self) -> bool:
        """Whether the statistics of keys mean anything here: latents have none that a rotary module made."""
        return self.packed and self.plan.kind is LayerKind.FULL

    def row(self, scheme: Scheme | None = None, attention: Attend = REFERENCE) -> Row:
        """Return an empty row under the plan, or with *scheme* and every token instead, to which *attention* attends."""
        return Row(
            scheme or self.plan.effective,
            sink_tokens=self.plan.sink_tokens,
            tail_tokens=self.plan.tail_tokens,
            fold_tokens=self.plan.fold_tokens,
            exact_prompt=self.plan.exact_prompt,
            token_budget=None if scheme else self.plan.token_budget,
            keys=self.keys,
            statistics_id=self.statistics_id,
            attention=attention,
            place=self.plan.index,
        )

    def probe_row(self) -> Row:
        """Return an empty row like `row` whose tokens are packed as soon as may be, for a probe of few tokens."""
        short = replace(
            self.plan,
            sink_tokens=min(self.plan.sink_tokens, PROBE_SINKS),
            tail_tokens=min(self.plan.tail_tokens, TILE),
            fold_tokens=TILE,
            exact_prompt=0,
            token_budget=None,
        )
        return replace(self, plan=short).row()

    def placed(
        self, stock: Any, make: Callable[[Any], Any], keep: Callable[[Any], Any] = lambda it: it
    ) -> Any:
        """Return what *make* makes of *stock*, or of the members in it that are ours, and what *keep* makes of the rest."""
        if not self.packed:
            return keep(stock)
        if not self.members:
            return make(stock)
        return CacheList(
            *(
                make(part) if at in self.members else keep(part)
                for at, part in enumerate(stock.caches)
            )
        )


class CacheFactory:
    """Makes the caches of a new sequence; installed as the model's `make_cache`.

    *one_row*: the model cannot run several sequences together, so its caches stand for a batch of one.
    *attention* attends to what is packed.
    """

    def __init__(
        self,
        stock: Callable[[], Caches],
        slots: Sequence[Slot],
        *,
        one_row: bool = False,
        attention: Attend = REFERENCE,
    ) -> None:
        self._stock = stock
        self._one_row = one_row
        self._attention = attention
        self.slots = tuple(slots)

    def __call__(self) -> Caches:
        """Return one cache for each slot, empty."""
        return self._make(lambda slot: slot.row(attention=self._attention))

    def packed(self, caches: Sequence[Any]) -> Caches:
        """Return copies of *caches*, mlx-lm's own with tokens in them, packed as those that this factory makes."""
        return convert_slots(caches, self.slots, self._attention)

    def stock(self) -> Caches:
        """Return mlx-lm's own caches."""
        made = self._stock()
        return [alone(cache) for cache in made] if self._one_row else made

    def unpacked(self) -> Caches:
        """Return our caches with every layer in full precision: what the probe compares with mlx-lm's own."""
        return self._make(lambda slot: slot.row(EXACT))

    def short(self) -> Caches:
        """Return our caches with so short a tail that a probe of few tokens attends to packed ones."""
        return self._make(Slot.probe_row)

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
        """Whether the keys of some layer are rotated and packed, and can be calibrated."""
        return any(slot.calibratable and slot.plan.effective.k.rotated for slot in self.slots)

    def calibrated(
        self, keys: Mapping[int, KeyTransform], statistics_id: str | None
    ) -> CacheFactory:
        """Return a factory whose slots take off their keys what *keys* has for their index."""
        return self._with(with_keys(self.slots, keys, statistics_id))

    def attended_by(self, attention: Attend) -> CacheFactory:
        """Return a factory of the same caches, to which *attention* attends."""
        return CacheFactory(self._stock, self.slots, one_row=self._one_row, attention=attention)

    @property
    def packed_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers whose caches are ours."""
        return tuple(dict.fromkeys(slot.plan.kind for slot in self.slots if slot.packed))

    def only(self, kind: LayerKind) -> CacheFactory:
        """Return a factory whose caches are ours in layers of *kind* alone."""
        slots = [
            replace(slot, packed=slot.packed and slot.plan.kind is kind) for slot in self.slots
        ]
        return self._with(slots)

    def fall_back(self, reason: str, kind: LayerKind | None = None) -> CacheFactory:
        """Return a factory of mlx-lm's own caches in layers of *kind*, or in all of them, for *reason*."""
        slots = [
            Slot(_unpacked(slot.plan, reason), packed=False)
            if slot.packed and kind in (None, slot.plan.kind)
            else slot
            for slot in self.slots
        ]
        return self._with(slots)

    def _with(self, slots: Sequence[Slot]) -> CacheFactory:
        return CacheFactory(self._stock, slots, one_row=self._one_row, attention=self._attention)

    def _make(self, row_of: Callable[[Slot], Row]) -> Caches:
        made = [
            _made(slot, stock, row_of)
            for slot, stock in zip(self.slots, self._stock(), strict=True)
        ]
        return [alone(cache) for cache in made] if self._one_row else made


def _made(slot: Slot, stock: Any, row_of: Callable[[Slot], Row]) -> Any:
    return slot.placed(stock, lambda _: _cache(slot.plan.kind, [row_of(slot)]))


def _cache(kind: LayerKind, rows: Sequence[Row]) -> SequenceCache | BatchCache:
    if kind is LayerKind.LATENT:
        return LatentCache(rows[0]) if len(rows) == 1 else BatchLatentCache(rows)
    return SequenceCache(rows[0]) if len(rows) == 1 else BatchCache(rows)


def plan_caches(
    model: Any, plans: Sequence[LayerPlan], *, batching: Batching = "rows"
) -> CacheFactory:
    """Return the factory of *model*'s caches under *plans*, one plan for each layer that holds a cache.

    A model that uses its layers several times (loops) may have a multiple of that number of caches, in order.
    """
    stock = getattr(model, "make_cache", None) or (lambda: [KVCache() for _ in model.layers])
    return CacheFactory(stock, plan_slots(stock(), plans), one_row=batching == "alone")


def plan_slots(made: Sequence[Any], plans: Sequence[LayerPlan]) -> list[Slot]:
    """Return what becomes of each of the caches *made* by a model under *plans*, as plan_caches does."""
    repeats, rest = divmod(len(made), max(len(plans), 1))
    if rest:
        reason = f"the model makes {len(made)} caches for {len(plans)} layers"
        return [Slot(_unpacked(_filler(plans, i), reason), packed=False) for i in range(len(made))]
    placed = list(zip(list(plans) * repeats, made, strict=True))
    wanted = {plan.kind for plan, cache in placed if _asks(plan) and _growing(cache)}
    return [_slot(plan, cache, wanted) for plan, cache in placed]


def with_keys(
    slots: Sequence[Slot], keys: Mapping[int, KeyTransform], statistics_id: str | None
) -> list[Slot]:
    """Return *slots* that take off their keys what *keys* has for their index, by the statistics of that id."""
    return [
        replace(slot, keys=keys.get(index), statistics_id=statistics_id if index in keys else None)
        for index, slot in enumerate(slots)
    ]


def _slot(plan: LayerPlan, cache: Any, wanted: set[LayerKind]) -> Slot:
    """Return the slot of *cache*. mlx-lm makes one mask for all layers of a kind, so one of *wanted* is ours throughout."""
    growing = _growing(cache)
    if growing and plan.kind in wanted:
        return Slot(plan, packed=True, members=growing if isinstance(cache, CacheList) else ())
    names = " and a ".join(type(part).__name__ for part in parts([cache]))
    return Slot(_unpacked(plan, f"the model keeps it in a {names}"), packed=False)


def _growing(cache: Any) -> tuple[int, ...]:
    """Return the positions of the plain growing caches in *cache*, which is one itself or may be composite."""
    return tuple(at for at, part in enumerate(parts([cache])) if type(part) is KVCache)


def _asks(plan: LayerPlan) -> bool:
    return plan.effective != EXACT or plan.token_budget is not None


def _filler(plans: Sequence[LayerPlan], index: int) -> LayerPlan:
    return plans[min(index, len(plans) - 1)]


def _unpacked(plan: LayerPlan, reason: str) -> LayerPlan:
    if not _asks(plan):
        return plan
    return replace(plan, effective=EXACT, token_budget=None, reason=reason)


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
        cache
        if (row := row_of(index)) is None
        else _cache(LayerKind.FULL, _rows(cache, row, index))
        for index, cache in enumerate(caches)
    ]


def convert_slots(
    caches: Sequence[Any], slots: Sequence[Slot], attention: Attend = REFERENCE
) -> Caches:
    """Return copies of *caches*, packed where they are ours in *slots* (plan_slots); the given ones are left as they are.

    *attention* attends to what is packed.
    """
    return [
        _converted(slot, cache, index, attention)
        for index, (slot, cache) in enumerate(zip(slots, caches, strict=True))
    ]


def _converted(slot: Slot, cache: Any, index: int, attention: Attend) -> Any:
    row = slot.row(attention=attention)
    return slot.placed(
        cache,
        lambda part: _cache(slot.plan.kind, _rows(part, row, index)),
        keep=copy.deepcopy,  # mlx-lm's own caches are written in place
    )


def _rows(cache: Any, row: Row, index: int) -> list[Row]:
    """Return a row like *row* for each sequence in *cache*, packed."""
    if type(cache) is not KVCache:
        raise ValueError(f"cache {index} is a {type(cache).__name__}; only a KVCache can be packed")
    if cache.empty():
        return [row]
    keys, values = cache.keys_and_values()
    rows = [row.fresh() for _ in range(keys.shape[0])]
    for each, k, v in zip(rows, keys, values, strict=True):
        each.append(k, v)
        each.pack()
    return rows


def vocab_size(model: Any) -> int:
    """Return how many logits *model* gives."""
    size: int = model(mx.array([[0]])).shape[-1]  # nothing is computed for a shape
    return size


def probe(model: Any, factory: CacheFactory, vocab_size: int) -> CacheFactory:
    """Run *model* on its own caches and on ours; return *factory*, or one that falls back with the reason.

    Where only the caches of some kinds of layers fail, only those fall back. A model on which all of
    ours fail still serves, on mlx-lm's own; what it raises on those is raised here.
    """
    expected = _two_passes(model, factory.stock(), PROBE_TOKENS, vocab_size)
    reason = _failure(model, factory, expected)
    if reason is None:
        return factory
    kinds = factory.packed_kinds
    if len(kinds) > 1:
        kept = factory
        for kind in kinds:
            why = _failure(model, factory.only(kind), expected)
            kept = kept if why is None else kept.fall_back(why, kind)
        if kept is not factory and _failure(model, kept, expected) is None:
            return kept
    return factory.fall_back(reason)


def _failure(model: Any, factory: CacheFactory, expected: mx.array) -> str | None:
    """Return why *model* cannot work on the caches of *factory*; None: it can, and gives *expected* on them."""
    if not factory.any_packed:
        return None
    vocab_size = expected.shape[-1]
    try:
        got = _two_passes(model, factory.unpacked(), PROBE_TOKENS, vocab_size)
        difference = _relative_difference(got, expected)
        if not difference <= _TOLERANCE.get(expected.dtype, 8e-2):
            return (
                f"its attention does not go through the cache (logits differ by {difference:.1%})"
            )
        packed = _two_passes(model, factory.short(), PACKED_PROBE_TOKENS, vocab_size)
        if not mx.all(mx.isfinite(packed)).item():
            return "packed keys and values gave infinite logits"
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises on a view means "not with this model"
        return f"its code needs plain keys and values ({type(error).__name__}: {first_line(error)})"
    return None


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


def parts(caches: Sequence[Any]) -> Iterator[Any]:
    """Yield every cache, those inside composite ones included."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from parts(cache.caches)
        else:
            yield cache
