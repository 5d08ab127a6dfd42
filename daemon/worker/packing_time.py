"""Estimate how long keys and values take to be packed.

MLX computes a whole step at once, and the next one ahead, so packing has no time of its own. Now and
then what the next step would pack anyway is packed by itself and timed; everything else that is packed
counts as the timed folds of about its size did on average. Numbers are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from daemon.cache.build import parts
from daemon.cache.sequence import BatchCache, SequenceCache

RESAMPLE_S = 5.0  # a sample waits for the step that is computed ahead, so there are few of them


class Packing(Protocol):
    """A row, or a cache of several."""

    @property
    def due_tokens(self) -> int:
        """Tokens that `pack` would move now."""
        ...

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that carries history."""
        ...

    def pack(self) -> None:
        """Move all tokens but the tail into tiles."""
        ...


@dataclass(slots=True)
class _Timed:
    """The folds of about one size that were timed; the next one is wanted at *next_at*."""

    seconds: float
    tokens: int
    next_at: float
    first: bool = True

    def add(self, seconds: float, tokens: int, next_at: float) -> None:
        """Take in one more; the first, which may have compiled a kernel, is no measure for the others."""
        if self.first:
            self.seconds, self.tokens, self.first = 0.0, 0, False
        self.seconds += seconds
        self.tokens += tokens
        self.next_at = next_at


class PackingTime:
    """The time of one engine, over all layers; used on the MLX thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._timed: dict[int, _Timed] = {}  # by the number of binary digits of the tokens

    def sample(self, layers: Sequence[Sequence[Packing]]) -> None:
        """Pack what is due in *layers*, the rows or caches of each, and time it, if such a sample is wanted."""
        due = max((sum(each.due_tokens for each in layer) for layer in layers), default=0)
        known = self._timed.get(due.bit_length())
        if not due or (known is not None and self._clock() < known.next_at):
            return
        mx.eval([each.arrays for layer in layers for each in layer])  # what else is in the making
        started = self._clock()
        for layer in layers:
            for each in layer:
                each.pack()
        mx.eval([each.arrays for layer in layers for each in layer])
        ended = self._clock()
        self.seconds += ended - started
        if known is None:
            self._timed[due.bit_length()] = _Timed(ended - started, due, next_at=ended)
        else:
            known.add(ended - started, due, ended + RESAMPLE_S)

    def count(self, tokens: int) -> None:
        """Count *tokens* that a step has packed."""
        if tokens > 0 and self._timed:
            size = min(self._timed, key=lambda known: abs(known - tokens.bit_length()))
            timed = self._timed[size]
            self.seconds += tokens * timed.seconds / timed.tokens


def packed_layers(caches: Sequence[Any]) -> list[SequenceCache | BatchCache]:
    """Return those of *caches* that are packed, layer by layer."""
    ours = (cache for cache in parts(caches) if isinstance(cache, SequenceCache | BatchCache))
    return [cache for cache in ours if cache.rows and cache.rows[0].packs]
