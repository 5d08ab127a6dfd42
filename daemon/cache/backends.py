"""Which kernels attend and pack in each layer of a model: decided at load, from what the layers really ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from daemon.cache.build import EXACT, CacheFactory, parts
from daemon.cache.latent import LatentCache
from daemon.cache.sequence import SequenceCache
from daemon.kernels import encode, reference
from daemon.kernels.attention import Attention
from daemon.kernels.backend import Choice
from daemon.kernels.case import Case
from daemon.kernels.stored import Stored

_LATENT = Choice("reference", "there are no kernels for packed latents")


@dataclass(frozen=True, slots=True)
class Backends:
    """What attends to a layer, and what packs its tokens.

    *attention* is fused and has failed where kernels attend to a row, but not to several at once.
    """

    attention: Choice
    packing: Choice


MLX = Backends(Choice("mlx"), Choice("mlx"))


class _Watch:
    """Attends by the reference, and remembers the last case that was asked for."""

    case: Case | None = None

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        self.case = Case.of(queries, stored, mask, sinks)
        return reference.attend(queries, stored, scale, mask, sinks)


def choices(
    model: Any, factory: CacheFactory, attention: Attention, *, rows: int = 1
) -> tuple[Backends, ...]:
    """Return what serves each slot of *factory* as up to *rows* sequences are decoded; kernels prove themselves on the way.

    Where nothing is packed, MLX's own attention does. Only the model's graph is built, nothing of it is computed.
    """
    caches = factory()
    watches = [_Watch() for _ in caches]
    for cache, watch in zip(caches, watches, strict=True):
        for part in parts([cache]):
            if isinstance(part, SequenceCache):
                part.row.attention = watch
    token = mx.zeros((1, 1), dtype=mx.int32)
    for _ in range(2):
        model(token, cache=caches)
    return tuple(
        _choice(list(parts([cache])), watch.case, attention, rows)
        for cache, watch in zip(caches, watches, strict=True)
    )


def _choice(caches: Sequence[Any], case: Case | None, attention: Attention, rows: int) -> Backends:
    packed = [
        cache for cache in caches if isinstance(cache, SequenceCache) and cache.row.scheme != EXACT
    ]
    if not packed:
        return MLX
    layout = packed[0].row.layout
    assert layout is not None, "a cache that nothing was put into"
    packing = encode.choice(layout)
    if isinstance(packed[0], LatentCache):
        return Backends(_LATENT, packing)
    assert case is not None, "a cache that nothing attends to"
    others = [attention.step_choice(case, count) for count in range(1, rows + 1)]
    others.append(attention.prompt_choice(case))
    failed = next((choice for choice in others if choice.failed), None)
    chosen = attention.choice(case)
    if failed is not None:
        chosen = replace(chosen, reason=failed.reason, failed=True)
    return Backends(chosen, packing)
