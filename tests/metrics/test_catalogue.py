"""Names, types and labels of metrics are part of the public surface: dashboards and alerts hold on to them."""

from __future__ import annotations

from pathlib import Path

from daemon.metrics.catalogue import FAMILIES

FROZEN = Path(__file__).with_name("names.txt")


def test_names_types_and_labels_are_frozen() -> None:
    """To add a metric, add its line. A line that changes or goes breaks what users have built: say so in the changelog."""
    written = [" ".join((it.name, it.kind, it.source, *it.labels)) for it in FAMILIES.values()]

    assert written == FROZEN.read_text().splitlines()


def test_counters_and_only_counters_end_in_total() -> None:
    assert all((it.kind == "counter") == it.name.endswith("_total") for it in FAMILIES.values())


def test_what_a_metric_means_is_one_sentence() -> None:
    assert all(it.meaning[-1] == "." and "\n" not in it.meaning for it in FAMILIES.values())
