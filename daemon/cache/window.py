"""Which tokens a layer with a token budget attends to: the sinks and the newest ones, by position alone.

Tokens after the sinks leave in whole tiles, oldest first. How many are gone when the token at a
position attends depends on that position and on nothing else, so a prompt read in chunks, read at
once or taken from a prompt cache sees the same tokens at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from daemon.kernels.packing import TILE


def dropped_at(position: int, budget: int) -> int:
    """Return how many tokens are gone when the token at *position* attends: the fewest whole tiles that leave *budget*."""
    return max(0, -(-(position + 1 - budget) // TILE)) * TILE


@dataclass(frozen=True, slots=True)
class Kept:
    """What a row with a token budget still holds: tokens 0 to *sinks*, and from *sinks* + *dropped* to *length*."""

    length: int
    sinks: int
    dropped: int
    budget: int

    def mask(self, queries: int, mask: mx.array | None) -> mx.array | None:
        """Return the mask over the kept tokens for the newest *queries*; None means causal.

        Args:
            queries: how many of the newest tokens attend.
            mask: None for causal, or boolean or additive over all *length* tokens, (..., queries, length).
        """
        if mask is not None and self.dropped:
            mask = mx.concatenate(
                [mask[..., : self.sinks], mask[..., self.sinks + self.dropped :]], axis=-1
            )
        first, last = self.length - queries, self.length - 1
        if dropped_at(last, self.budget) <= self.dropped:
            return mask
        seen = self._seen(first, queries)
        if mask is None:
            return seen
        return mask & seen if mask.dtype == mx.bool_ else mx.where(seen, mask, -mx.inf)

    def _seen(self, first: int, queries: int) -> mx.array:
        """Return which kept tokens each query may see, (queries, kept)."""
        positions = range(first, first + queries)
        oldest = mx.array([self.sinks + dropped_at(p, self.budget) for p in positions])[:, None]
        kept = mx.arange(self.length - self.dropped)
        position = mx.where(kept < self.sinks, kept, kept + self.dropped)[None]
        causal = position <= mx.array(list(positions))[:, None]
        return causal & ((position < self.sinks) | (position >= oldest))
