"""Estimate how long keys and values take to be packed.

MLX computes a whole step at once, and the next one ahead, so packing has no time of its own. Now and
then what the next step would pack anyway is packed by itself and timed; everything else that is packed
counts as the last timed fold of about its size did. Numbers are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from daemon.cache.build import parts
from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache

RESAMPLE_S = 10.0  # a sample waits for the step that is computed ahead, so there are few of them


@dataclass(frozen=True, slots=True)
class _Rate:
    token_s: float
    fresh_until: float


class PackingTime:
    """The time of one engine, over all layers; used on the MLX thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._rates: dict[int, _Rate] = {}  # by the number of binary digits of the tokens

    def sample(self, rows: Sequence[Sequence[Row]]) -> None:
        """Pack what is due in *rows*, those of each layer, and time it, if such a sample is wanted."""
        due = max((sum(row.due_tokens for row in layer) for layer in rows), default=0)
        known = self._rates.get(due.bit_length())
        if not due or (known is not None and self._clock() < known.fresh_until):
            return
        mx.eval([row.arrays for layer in rows for row in layer])  # what else is in the making
        started = self._clock()
        for layer in rows:
            for row in layer:
                row.pack()
        mx.eval([row.arrays for layer in rows for row in layer])
        ended = self._clock()
        self.seconds += ended - started
        # the first of its size may have compiled a kernel: it counts, and the next one is timed again
        fresh_until = ended if known is None else ended + RESAMPLE_S
        self._rates[due.bit_length()] = _Rate((ended - started) / due, fresh_until)

    def count(self, tokens: int) -> None:
        """Count *tokens* that a step has packed."""
        if tokens > 0 and self._rates:
            size = min(self._rates, key=lambda known: abs(known - tokens.bit_length()))
            self.seconds += tokens * self._rates[size].token_s


def packed_rows(caches: Sequence[Any]) -> list[list[Row]]:
    """Return the rows of those layers of *caches* that are packed, layer by layer."""
    ours = (cache for cache in parts(caches) if isinstance(cache, SequenceCache | BatchCache))
    return [cache.rows for cache in ours if cache.rows and cache.rows[0].packs]
