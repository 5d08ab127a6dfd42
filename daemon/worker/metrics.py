"""What a worker counts about its requests, for its snapshots and its metrics page."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from daemon.config.wire import Histogram, RequestCounts
from daemon.metrics import catalogue
from daemon.metrics.histogram import Observations
from daemon.worker.api.answers import Tally

RECENT = 4096  # TTFTs that percentiles are made of, at most


class RequestMetrics:
    """Counts of finished requests; lives on the event loop."""

    def __init__(self, window_s: float) -> None:
        self._duration_s = Observations(catalogue.REQUEST_S)
        self._ttft_s = Observations(catalogue.REQUEST_S)
        self._tpot_s = Observations(catalogue.TOKEN_S)
        self._window_s = window_s
        self._answered: Counter[tuple[str, int]] = Counter()
        self._recent_ttft_s: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def read(self, queue_time_s: Histogram | None) -> RequestCounts:
        """Return what was counted so far, beside what the engine has."""
        answered: dict[str, dict[str, int]] = {}
        for (endpoint, code), count in self._answered.items():
            answered.setdefault(endpoint, {})[str(code)] = count
        return RequestCounts(
            answered=answered,
            duration_s=self._duration_s.read(),
            ttft_s=self._ttft_s.read(),
            tpot_s=self._tpot_s.read(),
            queue_time_s=queue_time_s,
        )

    def finished(self, endpoint: str, code: int, tally: Tally, now: float) -> None:
        """Count a request that was answered with *code*, at *now* on the monotonic clock."""
        self._answered[endpoint, code] += 1
        if tally.generates and code == 200:
            self._duration_s.observe(now - tally.started)
        if tally.ttft_s is not None:
            self._ttft_s.observe(tally.ttft_s)
            self._recent_ttft_s.append((now, tally.ttft_s))
        for pace in tally.paces.values():
            if pace.token_s is not None:
                self._tpot_s.observe(pace.token_s)

    def ttft_quantiles(self, now: float, quantiles: Sequence[float]) -> list[float] | None:
        """Return *quantiles* of the TTFT over the window that ends at *now*; None without a request."""
        while self._recent_ttft_s and self._recent_ttft_s[0][0] <= now - self._window_s:
            self._recent_ttft_s.popleft()
        ranked = sorted(ttft_s for _, ttft_s in self._recent_ttft_s)
        if not ranked:
            return None
        return [ranked[max(math.ceil(share * len(ranked)) - 1, 0)] for share in quantiles]
