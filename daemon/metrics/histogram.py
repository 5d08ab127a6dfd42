"""Count observations into buckets of fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from daemon.config.wire import Histogram


class Observations:
    """A histogram that grows; *bounds* are upper bounds, ascending, and what is above the last counts too."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count *value*; one that equals a bound belongs below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> Histogram:
        """Return what was counted so far."""
        return Histogram(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum)
