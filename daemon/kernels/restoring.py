"""Attention of many query tokens on a GPU: a kernel gives all keys and values as the model made them, MLX attends to those.

A prompt's chunk attends to everything before it, so what a side's history is in full precision lasts for a
moment, in one layer. A kernel makes it in one node; in plain operations it would be a dozen for every few
thousand tokens (ADR 23).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from daemon.kernels import reference
from daemon.kernels.case import Case
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored

Restore = Callable[[Stored, Side, mx.Dtype], mx.array]


@dataclass(frozen=True, slots=True)
class Restoring:
    """A device's kernel for prompts.

    *restored* gives all keys, or all values, of a row as the model made them, (H, T, D) of a dtype.
    *unread* tells why it does not read what a case attends to, in words for the status.
    """

    restored: Restore
    unread: Callable[[Case], str | None]

    def refusal(self, case: Case) -> str | None:
        """Return why no kernel unpacks what *case* attends to; None: one does."""
        return self.unread(case)

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend from *queries* to everything *stored*, some of it packed; the contract is reference.attend's."""
        keys, values = (self.restored(stored, side, queries.dtype) for side in ("k", "v"))
        return reference.sdpa(queries, keys, values, scale, mask, sinks)
