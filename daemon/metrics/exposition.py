"""Write series in Prometheus' formats, each family as the catalogue has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from daemon.config.wire import Histogram
from daemon.metrics.catalogue import FAMILIES

_ORDER = {name: at for at, name in enumerate(FAMILIES)}
_PART = 100  # series, which take a millisecond
_END = b"# EOF\n"  # of a page in OpenMetrics


@dataclass(frozen=True, slots=True)
class Exposition:
    """One answer to a scrape."""

    body: bytes
    content_type: str


class Page(Collector):
    """The series of one scrape."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add one series of a gauge or counter.

        Raises:
            ValueError: the catalogue has no such family, or it has other labels.
        """
        self._metric(name, labels).add_sample(name, labels, value)

    def add_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        """Add the series of one histogram; raises as `add` does."""
        metric = self._metric(name, labels)
        totals = list(accumulate(histogram.counts))
        for bound, total in zip(_written(histogram.bounds), totals, strict=True):
            metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, total)
        metric.add_sample(f"{name}_count", labels, totals[-1])
        metric.add_sample(f"{name}_sum", labels, histogram.sum)

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have series, in the catalogue's order."""
        for name in sorted(self._metrics, key=_ORDER.__getitem__):
            yield self._metrics[name]

    def render(self, accept: str) -> Exposition:
        """Return the page in the format that a client *accept*s: OpenMetrics, or Prometheus' text."""
        return exposition(accept, self.parts(accept))

    def parts(self, accept: str) -> Iterator[bytes]:
        """Yield what `exposition` takes, some series at a time: a large page takes a while."""
        encode, _ = choose_encoder(accept)
        for metric in self.collect():
            for start in range(0, len(metric.samples), _PART):
                some = Metric(metric.name, metric.documentation, metric.type)
                some.samples = metric.samples[start : start + _PART]
                text = encode(_Alone(some)).removesuffix(_END)
                yield text if start == 0 else text.split(b"\n", 2)[2]  # without HELP and TYPE

    def _metric(self, name: str, labels: dict[str, str]) -> Metric:
        metric = self._metrics.get(name)
        if metric is None:
            family = FAMILIES.get(name)
            if family is None:
                raise ValueError(f"the catalogue has no metric {name}")
            metric = Metric(name.removesuffix("_total"), family.meaning, family.kind)
            self._metrics[name] = metric
        if labels.keys() - {"server"} != set(FAMILIES[name].labels):
            raise ValueError(f"{name} has the labels {FAMILIES[name].labels}, not {tuple(labels)}")
        return metric


@lru_cache  # every server has the same few
def _written(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(floatToGoString, bounds), "+Inf")


class _Alone(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def exposition(accept: str, parts: Iterable[bytes]) -> Exposition:
    """Return the page whose `Page.parts` are *parts*."""
    _, content_type = choose_encoder(accept)
    end = _END if "openmetrics" in content_type else b""
    return Exposition(b"".join(parts) + end, content_type)
