"""Sizes and durations as people write them, and back."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_SIZES = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_NUMBER_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")

MemoryBudget = Literal["auto"] | float | int


def parse_size(value: object) -> int:
    """Return bytes from an integer or from text such as ``512MiB``, ``4GiB`` or ``2GB``.

    Raises:
        ValueError: *value* is neither; the message lists the units.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        if value.isdigit():
            return int(value)
        match = _NUMBER_UNIT.fullmatch(value)
        if match and match[2] in _SIZES:
            return round(float(match[1]) * _SIZES[match[2]])
    raise ValueError(
        f"{value!r} is not a size; write bytes or a number with {', '.join(_SIZES)}, such as 4GiB"
    )


def parse_duration(value: object) -> float:
    """Return seconds from text such as ``300ms``, ``30s``, ``10m`` or ``1h``.

    A bare number is refused: nobody can tell whether it means seconds or minutes.

    Raises:
        ValueError: *value* is not such a text.
    """
    if isinstance(value, str):
        match = _NUMBER_UNIT.fullmatch(value)
        if match and match[2] in _DURATIONS:
            return float(match[1]) * _DURATIONS[match[2]]
    raise ValueError(f"{value!r} is not a duration; write a number with ms, s, m or h, such as 30s")


def parse_budget(value: object) -> MemoryBudget:
    """Return a memory budget: ``auto``, a share such as ``75%`` as a number up to 1, or bytes.

    Raises:
        ValueError: *value* is none of these.
    """
    if value == "auto":
        return "auto"
    if isinstance(value, float) and 0 < value <= 1:
        return value  # from a document of ours
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match and 0 < float(match[1]) <= 100:
        return float(match[1]) / 100
    try:
        size = parse_size(value)
    except ValueError:
        size = 0
    if not size:
        raise ValueError(
            f"{value!r} is not a memory budget; write auto, a share such as 75%, or a size such as 48GiB"
        )
    return size


def format_budget(budget: MemoryBudget) -> str | int:
    """Return *budget* as servers.yaml would say it."""
    return f"{budget * 100:g}%" if isinstance(budget, float) else budget


def format_size(count: float) -> str:
    """Return *count* bytes in the largest binary unit that keeps it at 1 or more: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return *seconds* as servers.yaml would say it: ``300ms``, ``30s``, ``10m``, ``1h``."""
    for unit in ("h", "m", "s"):
        count = seconds / _DURATIONS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{round(seconds * 1000)}ms"


def _size(value: object) -> int:
    return parse_size(value)


def _duration(value: object) -> float:
    # a number is what our own JSON documents carry; YAML text is checked before it gets here
    return float(value) if isinstance(value, float) else parse_duration(value)


Size = Annotated[
    int,
    BeforeValidator(_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\d+(\.\d+)?\s*(B|[KMGT]i?B)$"},
            ]
        }
    ),
]
Duration = Annotated[
    float,
    BeforeValidator(_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^\d+(\.\d+)?\s*(ms|s|m|h)$"}),
]
Budget = Annotated[
    MemoryBudget,
    BeforeValidator(parse_budget),
    PlainSerializer(format_budget),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "auto"},
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\d+(\.\d+)?\s*(%|B|[KMGT]i?B)$"},
            ]
        }
    ),
]
