"""What to write under `kv:` for a model, from its config.json alone: advice, nothing changes by itself.

The rules are those that mlxcel publishes for its own caches, by attention family and length of context,
in tqd's schemes. What this build would really do with a suggestion is asked of `resolve`, so that the
advice never names a scheme that would fall back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from daemon.errors import PolicyError
from daemon.policy.architecture import Architecture, LayerKind
from daemon.policy.budget import kv_bytes
from daemon.policy.request import request
from daemon.policy.resolve import LOW_GAIN, resolve
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.schemes import SCHEMES, parse_scheme
from daemon.policy.spec import KvSpec, NamedPolicy

SHORT, MEDIUM = 4096, 32768  # tokens up to which a context counts as short, as medium
UNKNOWN_CONTEXT = 131072  # tokens to size long contexts by, where config.json names no limit

_EXACT = "fp16"


class Attention(StrEnum):
    """The families that the rules tell apart."""

    STANDARD = "standard"
    SLIDING = "sliding window"
    HYBRID = "hybrid recurrent"
    LATENT = "latent (MLA)"
    RECURRENT = "recurrent"
    WINDOWED = "windows only"


@dataclass(frozen=True, slots=True)
class Choice:
    """One scheme: how servers.yaml says it, and the bytes of one sequence at the row's longest context."""

    scheme: str
    write: str
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Advice:
    """What to use up to *context_tokens*, what else is worth measuring, and why."""

    label: str
    context_tokens: int
    suggest: Choice
    exact: Choice
    also: tuple[Choice, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Advised:
    """The advice for a model, by length of context, and what it rests on."""

    model_type: str
    attention: Attention
    growing_layers: int
    layers: int
    head_dims: tuple[int, ...]
    max_context: int | None
    allowed: str | None
    rows: tuple[Advice, ...]
    notes: tuple[str, ...]


def attention_of(arch: Architecture) -> Attention:
    """Return the family of *arch* that the rules go by."""
    kinds = {layer.kind for layer in arch.layers} - {LayerKind.SHARED}
    windows = kinds & {LayerKind.SLIDING, LayerKind.CHUNKED}
    if LayerKind.LATENT in kinds:
        return Attention.LATENT
    if LayerKind.FULL not in kinds:
        return Attention.WINDOWED if windows else Attention.RECURRENT
    if LayerKind.RECURRENT in kinds:
        return Attention.HYBRID
    return Attention.SLIDING if windows else Attention.STANDARD


def advise(
    arch: Architecture, policies: Mapping[str, NamedPolicy], *, allowed: str | None
) -> Advised:
    """Return the advice for *arch*; *allowed* is why its keys may have 4 bits or fewer, None: they may not."""
    advisor = _Advisor(arch, policies, allowed)
    growing = [layer for layer in arch.layers if layer.grows]
    return Advised(
        model_type=arch.model_type,
        attention=attention_of(arch),
        growing_layers=len(growing),
        layers=len(arch.layers),
        head_dims=tuple(sorted({layer.head_dim_k for layer in growing})),
        max_context=arch.max_context,
        allowed=allowed,
        rows=advisor.rows(),
        notes=(*_notes(arch, len(growing)), *arch.notes),
    )


class _Advisor:
    """Looks suggestions up in the rules and asks the resolver what becomes of them."""

    def __init__(
        self, arch: Architecture, policies: Mapping[str, NamedPolicy], allowed: str | None
    ) -> None:
        self._arch = arch
        self._policies = policies
        self._allowed = allowed
        self._attention = attention_of(arch)

    def rows(self) -> tuple[Advice, ...]:
        """Return one row for each length of context that the model can have."""
        longest = self._arch.max_context or UNKNOWN_CONTEXT
        spans = [("short, up to 4k", 0, SHORT), ("medium, 4k to 32k", SHORT, MEDIUM)]
        spans.append(("long, above 32k", MEDIUM, max(longest, MEDIUM)))
        return tuple(
            self._row(label, min(most, longest), *self._rule(most))
            for label, least, most in spans
            if least < longest
        )

    def _rule(self, context: int) -> tuple[str, tuple[str, ...], str]:
        """Return the suggestion for *context* tokens, what else to measure, and why, before obstacles."""
        if self._attention in (Attention.RECURRENT, Attention.WINDOWED):
            return _EXACT, (), "no layer's cache grows with the context: there is nothing to save"
        if context <= SHORT:
            return _EXACT, (), "a short cache is small beside the weights: quantizing saves little"
        if self._attention is Attention.LATENT:
            return (
                "int8",
                (),
                "the latent vector is compressed already; 8 bits are the least for it",
            )
        if context <= MEDIUM:
            reason = "half the bytes, and the closest to the fp16 cache"
            return "int8", ("turbo4-delegated", "turbo8v4"), reason
        if self._allowed is not None:
            reason = f"the smallest that the allow-list has evidence for: {self._allowed}"
            return "turbo4v4", ("turbo4-delegated",), reason
        reason = (
            "keys, which matter most, keep 8 bits; 4-bit keys need a measurement of this model"
            " (tqd eval --policy turbo4v4 --record)"
        )
        return "turbo8v4", ("turbo4-delegated", "turbo0v4"), reason

    def _row(
        self, label: str, context: int, scheme: str, also: tuple[str, ...], reason: str
    ) -> Advice:
        exact = self._choice(_EXACT, context)
        assert exact is not None
        suggest = self._choice(scheme, context)
        if suggest is None:
            suggest, also = exact, ()
            reason = self._obstacle(scheme) or reason
        others = (self._choice(name, context) for name in also)
        return Advice(
            label=label,
            context_tokens=context,
            suggest=suggest,
            exact=exact,
            also=tuple(choice for choice in others if choice is not None),
            reason=reason,
        )

    def _choice(self, scheme: str, context: int) -> Choice | None:
        """Return *scheme* as a choice; None where this build does not have it, or no layer would get it."""
        resolved = self._resolved(KvSpec(mode=scheme))
        if resolved is None or (scheme != _EXACT and not _packs(resolved)):
            return None
        written = self._written(scheme, resolved)
        return Choice(scheme, written, kv_bytes(resolved, self._arch, context_tokens=context))

    def _resolved(self, spec: KvSpec) -> ResolvedPolicy | None:
        try:
            return resolve(request(spec, self._policies), self._arch, allowed=self._allowed)
        except PolicyError:
            return None

    def _obstacle(self, scheme: str) -> str | None:
        resolved = self._resolved(KvSpec(mode=scheme))
        reasons = [plan.reason for plan in resolved.layers if plan.reason] if resolved else []
        return f"{scheme} is not possible: {reasons[0]}" if reasons else None

    def _written(self, scheme: str, meant: ResolvedPolicy) -> str:
        """Return the line of servers.yaml: a named policy where one gives this model what *scheme* does."""
        for name, policy in self._policies.items():
            if parse_scheme(policy.mode) != SCHEMES.get(scheme):
                continue
            named = self._resolved(KvSpec(policy=name))
            if named is not None and _stored(named) == _stored(meant):
                return f"policy: {name}"
        return f"mode: {scheme}"


def _stored(resolved: ResolvedPolicy) -> list[tuple[object, ...]]:
    """Return how *resolved* stores each layer, whatever it was asked for."""
    return [
        (plan.effective, plan.sink_tokens, plan.tail_tokens, plan.fold_tokens, plan.token_budget)
        for plan in resolved.layers
    ]


def _packs(resolved: ResolvedPolicy) -> bool:
    return any(plan.effective != SCHEMES[_EXACT] for plan in resolved.layers)


def _notes(arch: Architecture, growing: int) -> list[str]:
    notes = []
    total = len(arch.layers)
    if 0 < growing < LOW_GAIN * total:
        notes.append(
            f"only {growing} of {total} layers hold a cache that grows: quantizing it saves little"
        )
    if arch.boundary_k:
        notes.append(
            "keys of this family carry a large constant part: fewer than 8 bits for keys are a risk"
            " unless the mean is removed; measure first"
        )
    if arch.max_context is None:
        notes.append(f"long contexts are sized at {UNKNOWN_CONTEXT:,} tokens")
    return notes
