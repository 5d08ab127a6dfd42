"""From what a server asks for to the scheme of each layer, with a reason where they differ.

`request` merges servers.yaml with the named policy; `resolve` applies the result to a model. Both
are pure, so that `tqd check`, the supervisor and the worker give the same answer.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from daemon.errors import PolicyError
from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.boundaries import Boundaries
from daemon.policy.matching import check_fold, check_pair, check_rules, check_scheme, check_tail
from daemon.policy.schemes import (
    AFFINE_GROUPS,
    DEFAULT_WINDOW,
    FP16,
    INT8,
    SCHEMES,
    TURBO4,
    Codec,
    Scheme,
    UnknownSchemeError,
    Window,
    parse_cache_type,
    parse_codec,
    parse_scheme,
    window_of,
)
from daemon.policy.spec import KvRequest, KvSpec, NamedPolicy
from daemon.policy.token_budgets import TokenBudgets
from daemon.policy.wishes import NO_CACHE, Wish, wishes

EXACT_PROMPT = 2048  # tokens of a prompt that `compress: first_decode` attends to in full precision
LOW_GAIN = 0.3  # below this share of layers that grow, quantizing them changes little

_EXACT = Scheme(FP16, FP16)
_WINDOW = "sliding window"
_NO_ROTATING = "sliding window: quantized rotating caches are not available yet"
_FIXED = {
    LayerKind.RECURRENT: "recurrent state, no KV cache",
    LayerKind.CHUNKED: "chunked attention",
}
_LATENT = "latent attention (MLA) caches a compressed vector already"
_GATHERED = "sparse attention reads single latents by their index"
_PACKED_LATENT = Scheme(INT8, FP16)  # of the pair that mlx-lm caches: the latent, the rotary key
_LATENT_NOTE = "int8 latent; the rotary key stays in full precision"
_SIDE_KEYS = ("cache_type_v", "cache_type_k", "v", "k")  # what may change one side alone
_EASILY_MISREAD = {
    "turbo3": "turbo3 means turbo0v3 here, keys in full precision; for 3-bit keys too write turbo3v3",
    "turbo3.5": "turbo3.5 means turbo3v4 here, 3-bit keys and 4-bit values; for 3.5 bits each write turbo3.5v3.5",
}
_HADAMARD_FACTORS = (1, 12, 20, 28)  # orders of the Hadamard matrices that MLX has beside 2^k


_T = TypeVar("_T")


def request(kv: KvSpec, policies: Mapping[str, NamedPolicy]) -> KvRequest:
    """Return what *kv* asks for once its named policy fills in what it leaves open.

    Raises:
        PolicyError: an unknown policy, scheme or codec, or a value that no model can have.
    """
    policy = policies.get(kv.policy)
    if policy is None:
        close = difflib.get_close_matches(kv.policy, policies, n=1)
        raise PolicyError(
            "policy",
            f'unknown policy "{kv.policy}"',
            hint=(f'did you mean "{close[0]}"? ' if close else "")
            + f"one of {', '.join(sorted(policies))}",
        )
    check_scheme(kv.mode, kv.k, kv.v)
    check_tail(kv.tail_tokens, "tail_tokens")
    check_fold(kv.fold_tokens, "fold_tokens")
    check_rules(kv.layers or ())
    base = parse_scheme(kv.mode or policy.mode)
    k, k_warnings = _side("k", kv.cache_type_k, kv.k, kv.mode, base.k)
    v, v_warnings = _side("v", kv.cache_type_v, kv.v, kv.mode, base.v)
    check_pair(Scheme(k, v), next((key for key in _SIDE_KEYS if getattr(kv, key)), "mode"))
    window = _window(kv, policy)
    warnings = [*k_warnings, *v_warnings, *_remarks(kv)]
    return KvRequest(
        policy=kv.policy,
        k=k.name,
        v=v.name,
        explicit=any((kv.mode, kv.k, kv.v, kv.cache_type_k, kv.cache_type_v)),
        boundary_v=_or(kv.boundary_v, policy.boundary_v),
        boundary_mode=_or(kv.boundary_mode, policy.boundary_mode),
        boundary_k=_or(kv.boundary_k, policy.boundary_k),
        sink_tokens=_or(kv.sink_tokens, policy.sink_tokens),
        tail_tokens=window.tail_tokens,
        fold_tokens=window.fold_tokens,
        compress=_or(kv.compress, policy.compress),
        strict=_or(kv.strict, policy.strict),
        calibration=_or(kv.calibration, "auto"),
        layers=_or(kv.layers, policy.layers),
        warnings=tuple(warnings),
    )


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
        return _groups(self.layers)

    @property
    def effective_counts(self) -> dict[str, int]:
        """The number of layers by scheme; layers that read another one's cache do not count."""
        own = [plan for plan in self.layers if plan.kind is not LayerKind.SHARED]
        return dict(Counter(plan.effective.name for plan in own))


def resolve(
    request: KvRequest, arch: Architecture, *, allowed: str | None, key_means: bool = True
) -> ResolvedPolicy:
    """Return what every layer of *arch* gets.

    *allowed* is why keys of 4 bits or fewer may be used (`allowance`); None: they may not. *key_means*:
    the mean of the keys is known, as it is unless a worker finds otherwise; `boundary_k: auto` is for the rest.

    Raises:
        PolicyError: a layer rule matches nothing, or, under `strict`, a layer would fall back.
    """
    asked, warnings = wishes(request, arch)
    plans = [_plan(wish, arch, allowed) for wish in asked]
    if request.compress == "first_decode":
        plans = [replace(plan, exact_prompt=EXACT_PROMPT) for plan in plans]
    budgets = TokenBudgets.of(asked, arch)
    if request.strict:
        _refuse_fallbacks([plan for plan in plans if _fell_back(plan)])
        budgets.refuse_missing()
    warnings += _fallback_warnings(asked, plans, arch)
    if allowed is not None and any(plan.effective.low_bit_keys for plan in plans):
        warnings.append(f"keys at 4 bits or fewer are allowed here: {allowed}")
    boundaries = Boundaries.of(request, arch, key_means=key_means)
    plans = [_budgeted(_raised(plan, boundaries), budgets) for plan in plans]
    plans = [_finished(plan, arch.layers[plan.index], plans) for plan in plans]
    return ResolvedPolicy(
        layers=tuple(plans),
        warnings=(*request.warnings, *warnings, *boundaries.warnings, *budgets.warnings),
        summary=summarize(plans),
    )


def rotation(head_dim: int) -> str:
    """Return how vectors of *head_dim* are rotated: by a Hadamard matrix of m·2^k, else a dense one."""
    for factor in _HADAMARD_FACTORS:
        power, rest = divmod(head_dim, factor)
        if rest == 0 and power & (power - 1) == 0:
            return "hadamard"
    return "dense"


def _or(value: _T | None, otherwise: _T) -> _T:
    return otherwise if value is None else value


def _side(
    side: str, cache_type: str | None, codec: str | None, mode: str | None, base: Codec
) -> tuple[Codec, list[str]]:
    """Return the codec of one side by precedence: cache_type, then k or v, then mode or policy."""
    if cache_type is None:
        return (base if codec is None else parse_codec(codec, side)), []
    try:
        chosen = parse_cache_type(cache_type, side)
    except UnknownSchemeError as error:
        raise PolicyError(f"cache_type_{side}", str(error), hint=error.hint) from error
    loser = f'{side} "{codec}"' if codec else f'mode "{mode}"' if mode else ""
    said = f'cache_type_{side} "{cache_type}" wins over {loser}: {side} is {chosen.name}'
    return chosen, [said] if loser else []


def _window(kv: KvSpec, policy: NamedPolicy) -> Window:
    """Return the tail of a request: what is written first, then what the written scheme brings, then the policy's."""
    both = kv.k and kv.v  # then no mode has a say
    names = (kv.cache_type_k, kv.cache_type_v, None if both else kv.mode)
    brought = next(filter(None, map(window_of, names)), None)
    if brought is None:
        own = window_of(None if both or kv.mode else policy.mode) or DEFAULT_WINDOW
        brought = Window(
            _or(policy.tail_tokens, own.tail_tokens), _or(policy.fold_tokens, own.fold_tokens)
        )
    return Window(
        _or(kv.tail_tokens, brought.tail_tokens), _or(kv.fold_tokens, brought.fold_tokens)
    )


def _remarks(kv: KvSpec) -> list[str]:
    """Return what is easily misunderstood in *kv*."""
    remarks = []
    if kv.mode and kv.k and kv.v:
        remarks.append(f'mode "{kv.mode}" has no effect: k and v are both given')
    modes = (kv.mode, *(rule.mode for rule in kv.layers or ()))
    written = {mode.lower() for mode in modes if mode is not None}
    remarks += [remark for name, remark in _EASILY_MISREAD.items() if name in written]
    if kv.boundary_v and kv.boundary_mode is None:
        remarks.append(
            "boundary_v keeps values at int8; where mlxcel's boundary layers are meant, which are"
            " fp16, write boundary_mode: fp16"
        )
    return remarks


def _plan(wish: Wish, arch: Architecture, allowed: str | None) -> LayerPlan:
    """Return what one layer gets by the rules of its architecture and the allow-list."""
    effective, reason = wish.scheme, None
    if wish.scheme != _EXACT:
        reason = _obstacle(wish, arch)
        if reason is not None:
            effective = _EXACT
        elif wish.layer.kind is LayerKind.LATENT:
            effective, reason = _PACKED_LATENT, _LATENT_NOTE
        elif not wish.scheme.fits(wish.layer.head_dim_k, wish.layer.head_dim_v):
            effective, reason = SCHEMES["int8"], _misfit(wish)
        elif wish.scheme.low_bit_keys and allowed is None:
            effective = _with_safe_keys(wish.scheme, explicit=wish.explicit)
            reason = f"keys at 4 bits or fewer are not allowed for {arch.model_type}"
    return LayerPlan(
        index=wish.layer.index,
        kind=wish.layer.kind,
        requested=wish.scheme.name,
        effective=effective,
        reason=reason,
        sink_tokens=wish.sink_tokens,
        tail_tokens=wish.tail_tokens,
        fold_tokens=wish.fold_tokens,
    )


def _obstacle(wish: Wish, arch: Architecture) -> str | None:
    """Return why a layer must stay in full precision; None: it need not."""
    kind = wish.layer.kind
    if kind in _FIXED:
        return _FIXED[kind]
    if arch.stock_cache is not None:
        return arch.stock_cache
    if kind is LayerKind.LATENT:
        return _latent_obstacle(wish)
    if kind is LayerKind.SLIDING:
        return _NO_ROTATING if wish.by_rule else _WINDOW
    return None


def _latent_obstacle(wish: Wish) -> str | None:
    """Return why a latent layer must stay in full precision: it has int8 only, and only where that is written out."""
    if wish.layer.indexer_dim:
        return _GATHERED
    if wish.explicit and wish.scheme in (SCHEMES["int8"], _PACKED_LATENT):
        return None
    return _LATENT


def _misfit(wish: Wish) -> str:
    """Return why the vectors of a layer cannot be stored as they are asked to be."""
    keys, values = wish.scheme.k, wish.scheme.v
    sides = ((keys, wish.layer.head_dim_k), (values, wish.layer.head_dim_v))
    codec, dim = next((codec, dim) for codec, dim in sides if not codec.fits(dim))
    unit = f"groups of {AFFINE_GROUPS[-1]}" if codec.affine else "pairs"
    return f"{codec.name} stores {unit}: head_dim {dim} does not divide into them"


def _with_safe_keys(scheme: Scheme, *, explicit: bool) -> Scheme:
    """Return *scheme* with keys that need no allowance.

    What was written out becomes turbo0v4 (values never get fewer bits than they had); what a named
    policy brings becomes turbo8v<its V>.
    """
    values = TURBO4 if scheme.v.affine else scheme.v  # an affine codec stands beside no other
    if not explicit:
        return Scheme(INT8, values)
    return Scheme(FP16, values if values.bits > TURBO4.bits else TURBO4)


def _fell_back(plan: LayerPlan) -> bool:
    packed_latent = plan.kind is LayerKind.LATENT and plan.effective == _PACKED_LATENT
    return plan.kind not in NO_CACHE and plan.effective.name != plan.requested and not packed_latent


def _refuse_fallbacks(plans: Sequence[LayerPlan]) -> None:
    """Raise PolicyError when there are any *plans*: layers that cannot have what they are asked."""
    if not plans:
        return
    lines = [
        f"  {_layers_text(group)} ({group.kind}): {group.requested} becomes {group.effective}:"
        f" {group.reason}"
        for group in _groups(plans)
    ]
    raise PolicyError(
        "strict",
        "\n".join([f"{len(plans)} layers cannot have the scheme they are asked to have", *lines]),
        hint="write layer rules that ask for what they can have, such as mode: fp16,"
        " or strict: false",
    )


def _fallback_warnings(
    wishes: Sequence[Wish], plans: Sequence[LayerPlan], arch: Architecture
) -> list[str]:
    """Return one warning for each kind of fallback, and one when there is little to gain."""
    asked = [wish for wish in wishes if wish.scheme != _EXACT]
    if not asked:
        return []
    warnings = []
    if arch.stock_cache is not None:
        modes = ", ".join(sorted({wish.scheme.name for wish in asked}))
        warnings.append(f"{arch.stock_cache}: {modes} becomes fp16")
    else:
        warnings += _latent_warnings(plans, arch)
    swaps = {
        (plan.requested, plan.effective.name)
        for plan in plans
        if _fell_back(plan) and plan.effective != _EXACT
    }
    warnings += [
        f"{before} becomes {after}: keys at 4 bits or fewer need a measurement of this model or an"
        f" allow-list entry for {arch.model_type}"
        for before, after in sorted(swaps)
    ]
    growing, total = sum(layer.grows for layer in arch.layers), len(arch.layers)
    if growing < LOW_GAIN * total:
        warnings.append(
            f"only {growing} of {total} layers hold a KV cache that grows with the context:"
            " quantizing it saves little"
        )
    return warnings


def _latent_warnings(plans: Sequence[LayerPlan], arch: Architecture) -> list[str]:
    kept = [plan for plan in plans if plan.kind is LayerKind.LATENT and _fell_back(plan)]
    if not kept:
        return []
    modes = ", ".join(sorted({plan.requested for plan in kept}))
    choice = "; mode: int8 packs the latents" if kept[0].reason == _LATENT else ""
    return [f"{arch.family} has latent attention (MLA): {modes} becomes fp16 there{choice}"]


def _raised(plan: LayerPlan, boundaries: Boundaries) -> LayerPlan:
    effective, note = boundaries.raised(plan.index, plan.effective)
    if note is None:
        return plan
    reason = "; ".join(filter(None, (plan.reason, f"boundary layer: {note}")))
    return replace(plan, effective=effective, reason=reason, boundary=note)


def _budgeted(plan: LayerPlan, budgets: TokenBudgets) -> LayerPlan:
    reason = "; ".join(filter(None, (plan.reason, budgets.note(plan.index))))
    granted = budgets.granted.get(plan.index)
    # tokens leave a budget in whole tiles, so they have to be packed by then
    exact_prompt = plan.exact_prompt if granted is None else 0
    return replace(plan, token_budget=granted, exact_prompt=exact_prompt, reason=reason or None)


def _finished(plan: LayerPlan, layer: Layer, plans: Sequence[LayerPlan]) -> LayerPlan:
    """Return *plan* with its rotation, or with what the layer it shares a cache with has."""
    if layer.source is not None:
        source = plans[layer.source]
        return replace(
            plan,
            requested=source.requested,
            effective=source.effective,
            reason=f"reads the cache of layer {layer.source}",
            sink_tokens=0,
            tail_tokens=0,
            fold_tokens=DEFAULT_WINDOW.fold_tokens,
            exact_prompt=0,
            token_budget=source.token_budget,
        )
    if plan.effective == _EXACT:
        sink_tokens = plan.sink_tokens if plan.token_budget else 0
        fold_tokens = DEFAULT_WINDOW.fold_tokens
        return replace(
            plan,
            sink_tokens=sink_tokens,
            tail_tokens=0,
            fold_tokens=fold_tokens,
            exact_prompt=0,
        )
    if plan.effective.k.affine:
        return plan
    keys, values = rotation(layer.head_dim_k), rotation(layer.head_dim_v)
    if plan.effective.k is FP16 or keys == values:
        return replace(plan, rotation=values)
    if plan.effective.v is FP16:
        return replace(plan, rotation=keys)
    return replace(plan, rotation=f"{keys} for keys, {values} for values")


def _groups(plans: Iterable[LayerPlan]) -> tuple[LayerGroup, ...]:
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


def _layers_text(group: LayerGroup) -> str:
    if group.first == group.last:
        return f"layer {group.first}"
    return f"layers {group.first}-{group.last}"


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
