"""What every layer of a model gets, told layer by layer, in groups and in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from daemon.policy.architecture import LayerKind
from daemon.policy.schemes import DEFAULT_WINDOW, FP16, Scheme

_EXACT = Scheme(FP16, FP16)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer gets.

    *boundary* says what a boundary layer keeps in more bits, such as `V int8`. *rotation* says how
    the vectors are rotated before they are packed: not at all under an affine scheme, nor in full
    precision, where there is no tail either, and no sinks. *exact_prompt* is the number of tokens up to which
    a prompt stays in full precision until it is decoded. *token_budget* is the most tokens that any
    token attends to there, the sinks (in full precision too) and the newest ones; None: all.
    """

    index: int
    kind: LayerKind
    requested: str
    effective: Scheme
    reason: str | None = None
    boundary: str | None = None
    sink_tokens: int = 0
    tail_tokens: int = 0
    fold_tokens: int = DEFAULT_WINDOW.fold_tokens
    rotation: str | None = None
    exact_prompt: int = 0
    token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Adjacent layers that get the same treatment; *last* is included."""

    first: int
    last: int
    kind: LayerKind
    requested: str
    effective: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class ResolvedPolicy:
    """The scheme of every layer, what a user should know, and one line that says it all."""

    layers: tuple[LayerPlan, ...]
    warnings: tuple[str, ...]
    summary: str

    def groups(self) -> tuple[LayerGroup, ...]:
        """Return runs of layers that differ in nothing but their index."""
        return groups_of(self.layers)

    @property
    def effective_counts(self) -> dict[str, int]:
        """The number of layers by scheme; layers that read another one's cache do not count."""
        own = [plan for plan in self.layers if plan.kind is not LayerKind.SHARED]
        return dict(Counter(plan.effective.name for plan in own))


def groups_of(plans: Iterable[LayerPlan]) -> tuple[LayerGroup, ...]:
    """Return runs of *plans* that are adjacent and differ in nothing but their index."""
    groups = []
    # adjacent layers that are alike have one key: index and position grow together
    for _, run in groupby(
        enumerate(plans), key=lambda item: (item[1].index - item[0], replace(item[1], index=0))
    ):
        members = [plan for _, plan in run]
        first = members[0]
        groups.append(
            LayerGroup(
                first=first.index,
                last=members[-1].index,
                kind=first.kind,
                requested=first.requested,
                effective=first.effective.name,
                reason=first.reason,
            )
        )
    return tuple(groups)


def summarize(plans: Sequence[LayerPlan]) -> str:
    """Return one line: "turbo8v4 on 24 of 28 layers; 4 boundary layers V int8"."""
    total = len(plans)
    own = [plan for plan in plans if plan.kind is not LayerKind.SHARED]
    quantized = [plan for plan in own if plan.effective != _EXACT]
    budgeted = Counter(plan.token_budget for plan in own if plan.token_budget)
    lossy = [f"{n} keep{'s' * (n == 1)} {budget:,} tokens" for budget, n in budgeted.items()]
    if not quantized:
        asked = sorted({plan.requested for plan in own} - {_EXACT.name})
        said = f"{', '.join(asked)} was asked for" if asked else ""
        return "; ".join(filter(None, (f"fp16 on {total} of {total} layers", said, *lossy)))
    plain = Counter(plan.effective.name for plan in quantized if plan.boundary is None)
    parts = [", ".join(f"{name} on {count} of {total} layers" for name, count in plain.items())]
    raised = Counter(plan.boundary for plan in own if plan.boundary is not None)
    parts += [f"{count} boundary layers {note}" for note, count in raised.items()]
    exact = Counter(plan.kind for plan in own if plan.effective == _EXACT and plan.boundary is None)
    parts += [f"{count} {kind} fp16" for kind, count in exact.items()]
    if shared := total - len(own):
        parts.append(f"{shared} read another layer's cache")
    return "; ".join(filter(None, [*parts, *lossy]))
