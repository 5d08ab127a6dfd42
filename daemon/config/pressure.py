"""How short of memory a machine is, in one word: a Mac says it itself, on Linux it is judged here.

On Linux two things count: the share of the last ten seconds in which programs stood still for want of memory
(the kernel's pressure stall information), and what could still be had.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Pressure = Literal["normal", "warn", "critical"]

STALLED_PERCENT = 10.0
LITTLE = 1 / 10  # of all memory
HARDLY_ANY = 1 / 30

_MAC_LEVELS: dict[int, Pressure] = {1: "normal", 2: "warn", 4: "critical"}
_LINE = re.compile(r"^(some|full) avg10=(\d+\.\d+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stalls:
    """Percent of the last ten seconds in which some program, or every one, waited for memory."""

    some: float = 0.0
    full: float = 0.0


def parse_stalls(text: str) -> Stalls:
    """Return what ``/proc/pressure/memory`` says; no stalls where the kernel does not count them."""
    return Stalls(**{kind: float(percent) for kind, percent in _LINE.findall(text)})


def from_mac(level: int | None) -> Pressure | None:
    """Return what ``kern.memorystatus_vm_pressure_level`` means; None: nothing known."""
    return None if level is None else _MAC_LEVELS.get(level)


def judge(available_bytes: int, total_bytes: int, stalls: Stalls) -> Pressure:
    """Return how short of memory a Linux machine is."""
    left = available_bytes / total_bytes
    if left < HARDLY_ANY or stalls.full >= STALLED_PERCENT:
        return "critical"
    if left < LITTLE or stalls.some >= STALLED_PERCENT:
        return "warn"
    return "normal"
