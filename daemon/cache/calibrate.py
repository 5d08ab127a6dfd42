"""Measure a model's keys once, so that they can be packed better for ever after.

A few thousand tokens of text run through the model on its own full-precision caches, watched from
two places: the rotary modules, whose input that became a layer's keys is the key before rotary
embedding, and attention, which shows the queries. From that come, per layer and KV head,

    μ = mean of the keys before rotary embedding, the first tokens of each run skipped,
    s = sqrt(σ_k / σ_q) per channel: σ_k² the variance of k - RoPE_p(μ), σ_q² the mean square of the
        queries of that head's group; limited to 1/16 … 16, geometric mean 1.

Both are exact reparametrizations: they change what is packed, not what is meant. Where the keys are not
what a rotary module returned (there is none, or something follows it), μ is the mean of the keys as they
are cached, the same at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from daemon.cache.build import CacheFactory
from daemon.cache.sequence import View
from daemon.kernels.keys import KeyTransform, Rotary, RotaryError
from daemon.kernels.rotation import Side

RUN_TOKENS = 1536
CHUNK = 256
SKIP_KEYS = 4  # the first tokens are sinks: large, unlike all others, and never packed
SKIP_QUERIES = 64
SCALE_LIMIT = 16.0
REGULARIZE = 1e-5  # of a head's mean: some models have channels that are exactly zero
_TINY = 1e-30  # and some have heads that are
CHECKPOINT = "checkpoint"  # the name of statistics that are the checkpoint's own key biases


@dataclass(frozen=True)
class KeyStatistics:
    """What was measured of one slot: (H, dim) float32 each.

    *mean* is that of keys before rotary embedding, or, *constant*, of keys as they are cached; *note* says why.
    """

    scale: mx.array
    mean: mx.array | None
    constant: bool = False
    note: str | None = None


class _Recorder:
    """Stands in for a slot's KVCache while a run is watched: stores exactly, and looks."""

    def __init__(self, calls: list[tuple[Any, mx.array, mx.array]]) -> None:
        self.inner = KVCache()
        self.rope: Any = None
        self.before: list[mx.array] = []
        self.squares: mx.array | None = None
        self.seen = 0
        self._calls = calls
        self._queries_at = 0

    @property
    def offset(self) -> int:
        return int(self.inner.offset)

    def make_mask(self, *args: Any, **options: Any) -> Any:
        return self.inner.make_mask(*args, **options)

    @property
    def state(self) -> Any:
        watched = [] if self.squares is None else [self.squares]
        return [*self.inner.state[:2], *self.before, *watched]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        for module, given, made in reversed(self._calls):
            if made is keys:
                self.rope = module
                self.before.append(given[0])
                break
        self._calls.clear()
        self._queries_at = self.offset
        self.inner.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[View, View]:
        """Return views, for layers that read another layer's cache."""
        return View(self, "k"), View(self, "v")

    def shape_of(self, side: Side) -> tuple[int, ...]:
        return tuple(self.inner.keys_and_values()[0 if side == "k" else 1].shape)

    def dtype_of(self, side: Side) -> mx.Dtype:
        dtype: mx.Dtype = self.inner.keys.dtype
        return dtype

    def attend(
        self, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
    ) -> mx.array:
        keys, values = self.inner.keys_and_values()
        skip = max(0, SKIP_QUERIES - self._queries_at)
        grouped = queries[0, :, skip:].astype(mx.float32)
        if grouped.shape[1]:
            squares = mx.square(grouped).reshape(keys.shape[1], -1, grouped.shape[-1]).sum(axis=1)
            self.squares = squares if self.squares is None else self.squares + squares
            self.seen += grouped.shape[1] * (queries.shape[1] // keys.shape[1])
        out: mx.array = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        return out


@dataclass
class _Totals:
    """Sums over the runs for one slot."""

    rope: Any = None
    before: mx.array | None = None
    count: int = 0
    keys: list[mx.array] = field(default_factory=list)
    squares: mx.array | None = None
    seen: int = 0


def calibrate(
    model: Any,
    factory: CacheFactory,
    runs: Sequence[Sequence[int]],
    progress: Callable[[float], None] = lambda _: None,
) -> dict[int, KeyStatistics]:
    """Return the statistics of every slot of *factory* that can have them, by its index.

    *runs* are token sequences, each run by itself. *progress* gets the share that is done, and may
    raise to end it.

    Raises:
        ValueError: the runs are too short to say anything.
    """
    if sum(max(0, len(run) - SKIP_QUERIES) for run in runs) < RUN_TOKENS // 4:
        raise ValueError(
            f"calibration needs at least {RUN_TOKENS // 4 + SKIP_QUERIES} tokens of text"
        )
    totals = {index: _Totals() for index, slot in enumerate(factory.slots) if slot.calibratable}
    all_tokens = sum(map(len, runs))
    done = 0
    with _watched_ropes(model) as calls:
        for run in runs:
            caches, recorders = _recorded(factory, calls)
            for start in range(0, len(run), CHUNK):
                chunk = list(run[start : start + CHUNK])
                model(mx.array(chunk)[None], cache=caches)
                mx.eval([cache.state for cache in caches])
                mx.clear_cache()
                done += len(chunk)
                progress(done / all_tokens)
            for index, total in totals.items():
                _add(total, recorders[index])
    return {index: _statistics(total) for index, total in totals.items()}


def attach(
    model: Any, factory: CacheFactory, statistics: Mapping[int, KeyStatistics]
) -> dict[int, KeyTransform]:
    """Return what each slot takes off its keys: *statistics* joined with the layers' own rotary modules.

    A mean that rotates and whose rotary module is not found is left out; its scale is kept.
    """
    ropes = _ropes(model, factory)
    known: dict[bytes, Rotary] = {}
    transforms = {}
    for index, entry in statistics.items():
        mean, rotary = entry.mean, None
        if mean is not None and not entry.constant:
            try:
                rotary = Rotary(ropes[index], mean.shape[-1])
                rotary = known.setdefault(rotary.signature, rotary)  # layers alike share one table
            except (KeyError, RotaryError):
                mean = None
        transforms[index] = KeyTransform(entry.scale, mean, rotary)
    return transforms


def checkpoint_means(
    model: Any, factory: CacheFactory, head_dims: Mapping[int, int]
) -> dict[int, KeyStatistics]:
    """Return the key biases of the checkpoint as means, for models of Qwen2's kind: no measurement needed.

    A projection's bias is the keys' mean as far as the weights alone can tell; a norm after it would
    make that untrue, so such layers are left out. *head_dims* gives the key head_dim of each layer.
    """
    found = {}
    for index, slot in enumerate(factory.slots):
        if not slot.calibratable or slot.plan.index >= len(model.layers):
            continue
        modules = dict(model.layers[slot.plan.index].named_modules())
        names = {name.rsplit(".", 1)[-1] for name in modules}
        projection = next(
            (module for name, module in modules.items() if name.endswith("k_proj")), None
        )
        if projection is None or "bias" not in projection or names & {"k_norm", "k_layernorm"}:
            continue
        head_dim = head_dims.get(slot.plan.index, 0)
        bias = projection["bias"].astype(mx.float32)
        if head_dim and bias.size % head_dim == 0:
            mean = bias.reshape(-1, head_dim)
            found[index] = KeyStatistics(mx.ones_like(mean), mean)
    return found


def _ropes(model: Any, factory: CacheFactory) -> dict[int, Any]:
    """Return the rotary module whose output is the keys of each slot of ours, found by running a few tokens."""
    with _watched_ropes(model) as calls:
        caches, recorders = _recorded(factory, calls)
        model(mx.array([[1, 2, 3]]), cache=caches)
    return {index: each.rope for index, each in recorders.items() if each.rope is not None}


def _recorded(
    factory: CacheFactory, calls: list[tuple[Any, mx.array, mx.array]]
) -> tuple[list[Any], dict[int, _Recorder]]:
    """Return caches of which those that can be calibrated are recorders, and these by their slot."""
    recorders = {
        index: _Recorder(calls) for index, slot in enumerate(factory.slots) if slot.calibratable
    }
    caches = factory.stock()
    for index, recorder in recorders.items():
        caches[index] = factory.slots[index].placed(caches[index], partial(_instead, recorder))
    return caches, recorders


def _instead(recorder: _Recorder, stock: Any) -> _Recorder:
    return recorder


@contextmanager
def _watched_ropes(model: Any) -> Iterator[list[tuple[Any, mx.array, mx.array]]]:
    """Record (module, input, output) of every rotary module's calls while the block runs."""
    calls: list[tuple[Any, mx.array, mx.array]] = []
    kinds = {type(module) for module in model.modules() if "rope" in type(module).__name__.lower()}
    originals = {kind: kind.__call__ for kind in kinds}

    def watch(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(module: Any, x: mx.array, *args: Any, **options: Any) -> mx.array:
            out = original(module, x, *args, **options)
            calls.append((module, x, out))
            return out

        return call

    for kind, original in originals.items():
        kind.__call__ = watch(original)
    try:
        yield calls
    finally:
        for kind, original in originals.items():
            kind.__call__ = original


def _add(total: _Totals, recorder: _Recorder) -> None:
    keys = recorder.inner.keys_and_values()[0][0]
    total.keys.append(keys)
    if recorder.before:
        total.rope = recorder.rope
        before = mx.concatenate(recorder.before, axis=1).astype(mx.float32)[:, SKIP_KEYS:]
        summed = before.sum(axis=1)
        total.before = summed if total.before is None else total.before + summed
        total.count += before.shape[1]
    if recorder.squares is not None:
        total.squares = (
            recorder.squares if total.squares is None else total.squares + recorder.squares
        )
        total.seen += recorder.seen


def _statistics(total: _Totals) -> KeyStatistics:
    rotary: Rotary | None = None
    note: str | None = "its keys are not what a rotary module returned"
    if total.before is not None:
        mean = total.before / total.count
        try:
            rotary, note = Rotary(total.rope, mean.shape[-1]), None
        except RotaryError as error:
            note = f"its rotary embedding is unusual ({error})"
    if rotary is None:
        cached = mx.concatenate([keys[:, SKIP_KEYS:] for keys in total.keys], axis=1)
        mean = mx.mean(cached.astype(mx.float32), axis=1)
    transform = KeyTransform(mx.ones_like(mean), mean, rotary)
    squares, count = mx.zeros_like(transform.scale), 0
    for keys in total.keys:
        centered = transform.centered(keys[:, SKIP_KEYS:], SKIP_KEYS)
        squares = squares + mx.square(centered).sum(axis=1)
        count += centered.shape[1]
    scale = key_scale(
        squares / count, None if total.squares is None else total.squares / total.seen
    )
    mx.eval(mean, scale)
    return KeyStatistics(scale, mean, constant=rotary is None, note=note)


def key_scale(key_squares: mx.array, query_squares: mx.array | None) -> mx.array:
    """Return s = sqrt(σ_k/σ_q) per channel from mean squares (H, dim), geometric mean 1 over each head's channels."""
    if query_squares is None:
        return mx.ones_like(key_squares)
    k, q = (
        squares + REGULARIZE * mx.mean(squares, axis=-1, keepdims=True) + _TINY
        for squares in (key_squares, query_squares)
    )
    log_scale = (mx.log(k) - mx.log(q)) / 4
    log_scale = log_scale - mx.mean(log_scale, axis=-1, keepdims=True)
    limited = mx.clip(mx.exp(log_scale), 1 / SCALE_LIMIT, SCALE_LIMIT)
    return limited / mx.exp(mx.mean(mx.log(limited), axis=-1, keepdims=True))
