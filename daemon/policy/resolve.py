"""From what a server asks for to the scheme of each layer of a model, with a reason where they differ.

It is pure, so that `tqd check`, the supervisor and the worker give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from daemon.errors import PolicyError
from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.boundaries import Boundaries
from daemon.policy.resolved import LayerGroup, LayerPlan, ResolvedPolicy, groups_of, summarize
from daemon.policy.schemes import (
    AFFINE_GROUPS,
    DEFAULT_WINDOW,
    FP16,
    INT8,
    SCHEMES,
    TURBO4,
    Scheme,
)
from daemon.policy.spec import KvRequest
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
_HADAMARD_FACTORS = (1, 12, 20, 28)  # orders of the Hadamard matrices that MLX has beside 2^k


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
    unit = (
        f"groups of {AFFINE_GROUPS[-1]}" if codec.affine else "eights" if codec.trellis else "pairs"
    )
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
        for group in groups_of(plans)
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


def _layers_text(group: LayerGroup) -> str:
    if group.first == group.last:
        return f"layer {group.first}"
    return f"layers {group.first}-{group.last}"
