"""Divide the machine's memory among the servers: pure arithmetic in bytes.

The rule, whole: what every server *needs* comes first, and one whose needs do not fit beside what the
others hold does not start. What is left is divided evenly, and nobody gets more than it *wants*. What a
server's running requests may still use is never taken back from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from daemon.policy.claim import Claim
from daemon.units import format_size

HINT = "stop another server, lower its max_context, or raise daemon.memory_budget"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a server cannot start: what it needs, what is left, and what the others hold, in bytes."""

    needs_bytes: int
    free_bytes: int
    budget_bytes: int
    held_by: Mapping[str, int]

    def __str__(self) -> str:
        held = ", ".join(f"{name} holds {format_size(size)}" for name, size in self.held_by.items())
        others = f": {held}" if held else ""
        return (
            f"it needs {format_size(self.needs_bytes)}, and {format_size(max(0, self.free_bytes))} of the"
            f" {format_size(self.budget_bytes)} for all servers are free{others}"
        )


def divide(budget_bytes: int, claims: Mapping[str, Claim]) -> dict[str, int]:
    """Return the share of each server of *claims*: its needs, and an even part of what they leave.

    Where the needs alone are more than there is, every share is what its server needs.
    """
    left = max(0, budget_bytes - sum(claim.needs_bytes for claim in claims.values()))
    shares = {}
    extras = {name: it.wants_bytes - it.needs_bytes for name, it in claims.items()}
    for waiting, name in zip(range(len(extras), 0, -1), sorted(extras, key=extras.__getitem__), strict=True):  # fmt: skip
        extra = min(extras[name], left // waiting)
        left -= extra
        shares[name] = claims[name].needs_bytes + extra
    return shares


def admit(budget_bytes: int, claim: Claim, held: Mapping[str, int]) -> Refusal | None:
    """Return why a server with *claim* has no room beside what others hold; None: it has."""
    free = budget_bytes - sum(held.values())
    if claim.needs_bytes <= free:
        return None
    return Refusal(claim.needs_bytes, free, budget_bytes, held)


def admit_in_turn(
    budget_bytes: int, newcomers: Iterable[tuple[str, Claim]], held: Mapping[str, int]
) -> dict[str, Refusal]:
    """Return which of *newcomers* have no room, each beside what others hold and those before it need."""
    held = dict(held)
    refused = {}
    for name, claim in newcomers:
        others = {other: size for other, size in held.items() if other != name}
        refusal = admit(budget_bytes, claim, others)
        if refusal is None:
            held = others | {name: claim.needs_bytes}
        else:
            refused[name] = refusal
    return refused


def words(claim: Claim) -> str:
    """Return what a server needs, taken apart, for a person."""
    caches = claim.needs_bytes - claim.fixed_bytes
    return (
        f"weights {format_size(claim.weights_bytes)}, process {format_size(claim.process_bytes)}, scratch"
        f" {format_size(claim.scratch_bytes)}, caches {format_size(caches)}"
    )
