"""What is asked for each layer, before the model has its say: the request, then the layer rules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.matching import check_pair, check_token_budget, matching
from daemon.policy.schemes import Scheme, Window, parse_codec, parse_scheme, window_of
from daemon.policy.spec import KvRequest, LayerRule

NO_CACHE = (LayerKind.RECURRENT, LayerKind.SHARED)  # kinds without a KV cache of their own


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for one layer.

    *explicit*: the scheme was written in servers.yaml, not taken from a named policy; *by_rule*: a
    layer rule for these very layers asks for it.
    """

    layer: Layer
    scheme: Scheme
    explicit: bool
    by_rule: bool
    sink_tokens: int
    tail_tokens: int
    fold_tokens: int
    token_budget: int | None = None


def wishes(request: KvRequest, arch: Architecture) -> tuple[list[Wish], list[str]]:
    """Return what is asked for every layer, and warnings about rules without effect.

    Raises:
        PolicyError: a rule matches no layer, or one that the model does not have, or makes a pair of
            codecs that is no scheme, or its token budget has no room for the layer's sinks and tail.
    """
    base = Scheme(parse_codec(request.k, "k"), parse_codec(request.v, "v"))
    asked = [
        Wish(
            layer=layer,
            scheme=base,
            explicit=request.explicit,
            by_rule=False,
            sink_tokens=request.sink_tokens,
            tail_tokens=request.tail_tokens,
            fold_tokens=request.fold_tokens,
        )
        for layer in arch.layers
    ]
    warnings = []
    budget_rules: dict[int, int] = {}
    for i, rule in enumerate(request.layers):
        matched = matching(rule.match, arch.layers, f"layers.{i}.match")
        if all(arch.layers[index].kind in NO_CACHE for index in matched):
            warnings.append(f"layers.{i} has no effect: its layers hold no KV cache of their own")
        asked = [_ruled(wish, rule) if wish.layer.index in matched else wish for wish in asked]
        for wish in asked:
            check_pair(wish.scheme, f"layers.{i}")
        if rule.token_budget is not None:
            budget_rules |= dict.fromkeys(matched, i)
    for wish in asked:
        if wish.token_budget is not None:
            check_token_budget(
                wish.token_budget,
                f"layers.{budget_rules[wish.layer.index]}.token_budget",
                sink_tokens=wish.sink_tokens,
                tail_tokens=wish.tail_tokens,
                fold_tokens=wish.fold_tokens,
            )
    return asked, warnings


def _ruled(wish: Wish, rule: LayerRule) -> Wish:
    """Return *wish* as *rule* changes it. A scheme in a rule was written by someone: explicit."""
    scheme = parse_scheme(rule.mode) if rule.mode else wish.scheme
    if rule.k:
        scheme = replace(scheme, k=parse_codec(rule.k, "k"))
    if rule.v:
        scheme = replace(scheme, v=parse_codec(rule.v, "v"))
    given = bool(rule.mode or rule.k or rule.v)
    window = window_of(rule.mode) or Window(wish.tail_tokens, wish.fold_tokens)
    return replace(
        wish,
        scheme=scheme,
        explicit=wish.explicit or given,
        by_rule=wish.by_rule or (given and rule.match != "all"),
        sink_tokens=wish.sink_tokens if rule.sink_tokens is None else rule.sink_tokens,
        tail_tokens=window.tail_tokens if rule.tail_tokens is None else rule.tail_tokens,
        fold_tokens=window.fold_tokens if rule.fold_tokens is None else rule.fold_tokens,
        token_budget=wish.token_budget if rule.token_budget is None else rule.token_budget,
    )
