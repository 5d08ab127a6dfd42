"""What promtool and the naming conventions of Prometheus ask of a page, checked on its text."""

from __future__ import annotations

import re
from collections import Counter

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

OTHER_UNITS = re.compile(r"_(ms|milliseconds|microseconds|minutes|mb|gb|kb|percent|pct)(_|$)")


def lint(text: str) -> list[str]:
    """Return what is wrong with *text*; nothing where all is well."""
    families = list(text_string_to_metric_families(text))
    return [
        *_described(text, families),
        *(problem for family in families for problem in _named(family)),
        *_unique(families),
        *(problem for family in families for problem in _cumulative(family)),
    ]


def _described(text: str, families: list[Metric]) -> list[str]:
    problems = []
    for kind in ("HELP", "TYPE"):
        told = Counter(re.findall(rf"^# {kind} (\S+) ", text, re.MULTILINE))
        for family in families:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if told[name] != 1:
                problems.append(f"{name} has {told[name]} lines of {kind}")
    return problems


def _named(family: Metric) -> list[str]:
    problems = []
    names = {sample.name for sample in family.samples}
    if not re.fullmatch(r"tqd_[a-z0-9]+(_[a-z0-9]+)*", family.name):
        problems.append(f"{family.name} is not lower_snake_case after tqd_")
    if OTHER_UNITS.search(family.name):
        problems.append(f"{family.name} is not in a base unit")
    if family.type == "counter" and names != {f"{family.name}_total"}:
        problems.append(f"the counter {family.name} does not end in _total")
    if family.type == "gauge" and family.name.endswith(("_total", "_count", "_sum", "_bucket")):
        problems.append(f"the gauge {family.name} is named like a counter or histogram")
    if family.type == "histogram" and not family.name.endswith("_seconds"):
        problems.append(f"the histogram {family.name} does not say its unit")
    return problems


def _unique(families: list[Metric]) -> list[str]:
    series = Counter(
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families
        for sample in family.samples
    )
    return [
        f"{name}{dict(labels)} is there {n} times" for (name, labels), n in series.items() if n > 1
    ]


def _cumulative(family: Metric) -> list[str]:
    if family.type != "histogram":
        return []
    problems = []
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            labels = tuple(sorted(it for it in sample.labels.items() if it[0] != "le"))
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
    for labels, found in buckets.items():
        counts = [count for _, count in sorted(found)]
        if counts != sorted(counts) or sorted(found)[-1][0] != float("inf"):
            problems.append(f"the buckets of {family.name}{dict(labels)} do not grow up to +Inf")
    return problems


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every series of *text* with its value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float | None:
    """Return the value of one series of *text*, None where it is not there."""
    return values(text).get((name, frozenset(labels.items())))
