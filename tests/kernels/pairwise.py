"""Few combinations of many properties: every two values of any two properties meet in one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """Return every two properties of *row* with their values."""
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}


def pairwise(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda _: True
) -> list[Row]:
    """Return rows, each a value of every axis, in which all pairs of values occur that an *allowed* row can have.

    Greedy and without chance: a row begins with a pair that is still missing, and takes of every other axis
    the value that brings most missing pairs. *allowed* must be decided by two axes together.
    """
    names = list(axes)
    missing = dict.fromkeys(
        (a, one, b, other)
        for a, b in combinations(names, 2)
        for one, other in product(axes[a], axes[b])
        if allowed({a: one, b: other})
    )
    rows = []
    while missing:
        a, one, b, other = next(iter(missing))
        row: Row = {a: one, b: other}
        for name in names:
            if name not in row:
                fitting = [value for value in axes[name] if allowed({**row, name: value})]
                row[name] = max(fitting, key=lambda value: _gain(row, name, value, names, missing))
        row = {name: row[name] for name in names}
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append(row)
    return rows


def _gain(row: Row, name: str, value: Any, names: list[str], missing: Mapping[Pair, None]) -> int:
    """Return how many missing pairs *value* makes with what *row* has."""
    count = 0
    for other, its in row.items():
        first = names.index(name) < names.index(other)
        count += ((name, value, other, its) if first else (other, its, name, value)) in missing
    return count
