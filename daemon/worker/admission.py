"""Decide by memory which requests may run: what each sequence may still grow to is set aside when it starts.

MLX's own limits stop nothing, and on a Mac running out of memory ends the process, so a request that might
not have room waits in the line instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from daemon.config.spec import ServerSpec


@dataclass(frozen=True, slots=True)
class Costs:
    """What sequences of a loaded model take.

    *sequence_bytes* is for one that may grow to so many tokens; *padded*: in a batch every one is as long as
    the longest. Prompts are read together up to *reading_tokens* in all.
    """

    sequence_bytes: Callable[[int], int]
    padded: bool
    reading_tokens: int

    def total_bytes(self, lengths: Iterable[int]) -> int:
        """Return what sequences that may grow to *lengths* tokens take together."""
        return sum(map(self.sequence_bytes, self._as_kept(lengths)))

    def can_read(self, prompts: Iterable[int]) -> bool:
        """Return whether prompts of so many tokens may be read together; one alone always may."""
        kept = self._as_kept(prompts)
        return len(kept) <= 1 or sum(kept) <= self.reading_tokens

    def _as_kept(self, lengths: Iterable[int]) -> list[int]:
        found = list(lengths)
        return [max(found)] * len(found) if self.padded and found else found


def kv_limit(
    server: ServerSpec, *, share_bytes: int | None, reserve_bytes: int, weights_bytes: int
) -> int | None:
    """Return the bytes that all sequences together may take; None: as many as run.

    *share_bytes* is the worker's share of the machine's memory, None where nobody counts; *reserve_bytes* of
    it are for the process and for reading prompts.
    """
    budget = server.kv.budget
    if budget == "none":
        return None
    own = budget if isinstance(budget, int) else None
    if share_bytes is None:
        return own
    room = max(0, share_bytes - reserve_bytes - weights_bytes)
    return room if own is None else min(room, own)
