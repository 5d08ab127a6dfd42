"""Token budgets: which layers can drop the middle of a sequence, and what a user must know about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from daemon.errors import PolicyError
from daemon.policy.architecture import Architecture, LayerKind
from daemon.policy.wishes import NO_CACHE, Wish


@dataclass(frozen=True, slots=True)
class TokenBudgets:
    """The budget of each layer that gets one, why others do not, and the warnings.

    *missing* has one line for each reason; a window that is no longer than the budget misses nothing.
    """

    granted: dict[int, int]
    missing: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, wishes: Sequence[Wish], arch: Architecture) -> Self:
        """Return the token budgets that *wishes* mean for a model."""
        granted: dict[int, int] = {}
        kept: dict[tuple[int, int], list[int]] = {}
        obstacles: dict[str, list[int]] = {}
        for wish in wishes:
            budget, layer = wish.token_budget, wish.layer
            if budget is None or layer.kind in NO_CACHE:
                continue
            if layer.index in arch.eligible:
                granted[layer.index] = budget
                kept.setdefault((budget, wish.sink_tokens), []).append(layer.index)
            elif layer.window is None or layer.window > budget:
                obstacles.setdefault(_obstacle(wish, arch), []).append(layer.index)
        missing = tuple(
            f"{layers_text(indices)}: no token_budget, {why}" for why, indices in obstacles.items()
        )
        lossy = [
            f"{layers_text(indices)}: a token budget of {budget:,} keeps the first {sinks} tokens and the"
            " newest ones and drops those between (lossy)"
            for (budget, sinks), indices in kept.items()
        ]
        return cls(granted, missing, (*lossy, *missing))

    def refuse_missing(self) -> None:
        """Raise PolicyError where a layer cannot have the budget it is asked to have."""
        if self.missing:
            raise PolicyError(
                "strict",
                "\n".join(["layers cannot have a token budget", *(f"  {m}" for m in self.missing)]),
                hint="let the rule match full layers only, or write strict: false",
            )

    def note(self, index: int) -> str | None:
        """Return what layer *index* keeps, for the reports; None: everything."""
        budget = self.granted.get(index)
        return None if budget is None else f"keeps {budget:,} tokens (lossy)"


def layers_text(indices: Iterable[int]) -> str:
    """Return *indices*, ascending, as "layer 3" or "layers 0-4, 7"."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"layers {text}"


def _obstacle(wish: Wish, arch: Architecture) -> str:
    match wish.layer.kind:
        case LayerKind.LATENT:
            return "latent attention (MLA) needs every token"
        case LayerKind.SLIDING | LayerKind.CHUNKED:
            return f"the window is {wish.layer.window:,} tokens"
        case _:
            return arch.stock_cache or "mlx-lm's own cache is kept"
