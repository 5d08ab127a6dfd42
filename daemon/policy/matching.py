"""Layer rules: which layers `match` means, and what a rule may say."""

from __future__ import annotations

import re
from collections.abc import Sequence

from daemon.errors import PolicyError
from daemon.policy.architecture import Layer, LayerKind
from daemon.policy.schemes import Scheme, UnknownSchemeError, parse_codec, parse_scheme
from daemon.policy.spec import LayerRule, Match

TILE_TOKENS = 32  # tokens are packed one tile at a time

_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})")
_ENDS = re.compile(r"(first|last):([1-9]\d{0,5})")
_FORMS = 'all, full, sliding, "0-3", "first:2", "last:2" or a list such as [0, 5, 9]'


def check_tail(tail_tokens: int | None, path: str) -> None:
    """Refuse a tail that is not made of whole tiles; raises PolicyError at *path*."""
    if tail_tokens is not None and tail_tokens % TILE_TOKENS:
        below = tail_tokens // TILE_TOKENS * TILE_TOKENS
        raise PolicyError(
            path,
            f"{tail_tokens} is not a multiple of {TILE_TOKENS}: the tail folds one tile of"
            f" {TILE_TOKENS} tokens at a time and holds up to {TILE_TOKENS - 1} tokens more",
            hint=f"write {below} or {below + TILE_TOKENS}",
        )


def check_fold(fold_tokens: int | None, path: str) -> None:
    """Refuse a fold that is not made of whole tiles; raises PolicyError at *path*."""
    _check_tiles(fold_tokens, path, "packed")


def check_pair(scheme: Scheme, path: str) -> None:
    """Refuse an affine codec beside another one; raises PolicyError at *path*."""
    if scheme.mixed:
        whole = scheme.k if scheme.k.affine else scheme.v
        raise PolicyError(
            path,
            f"{scheme.k.name} keys with {scheme.v.name} values are no scheme:"
            f" {whole.name} is for both or for neither",
            hint=f"write mode: {whole.name}, or a codec that is not affine for keys and for values",
        )


def least_token_budget(sink_tokens: int, tail_tokens: int, fold_tokens: int = TILE_TOKENS) -> int:
    """Return the smallest token budget that these sinks, a tail at its fullest and one packed tile fit in."""
    tokens = sink_tokens + tail_tokens + fold_tokens + TILE_TOKENS
    return -(-tokens // TILE_TOKENS) * TILE_TOKENS


def check_token_budget(
    token_budget: int, path: str, *, sink_tokens: int, tail_tokens: int, fold_tokens: int
) -> None:
    """Refuse a token budget that sinks and tail do not fit in; raises PolicyError at *path*."""
    least = least_token_budget(sink_tokens, tail_tokens, fold_tokens)
    if token_budget < least:
        raise PolicyError(
            path,
            f"{token_budget} is too little for {sink_tokens} sink tokens, a tail of up to"
            f" {tail_tokens + fold_tokens - 1} tokens and a tile of {TILE_TOKENS}",
            hint=f"write {least} or more",
        )


def check_rules(rules: Sequence[LayerRule]) -> None:
    """Refuse rules that could not be right for any model.

    Raises:
        PolicyError: an unknown scheme or codec, a `match` of no known form, a rule that sets nothing.
    """
    for i, rule in enumerate(rules):
        path = f"layers.{i}"
        _check_match(rule.match, f"{path}.match")
        check_tail(rule.tail_tokens, f"{path}.tail_tokens")
        check_fold(rule.fold_tokens, f"{path}.fold_tokens")
        check_scheme(rule.mode, rule.k, rule.v, path)
        _check_tiles(rule.token_budget, f"{path}.token_budget", "dropped")
        if not rule.model_fields_set - {"match"}:
            raise PolicyError(
                path,
                "the rule sets nothing",
                hint="write mode, k, v, sink_tokens, tail_tokens, fold_tokens or token_budget",
            )


def check_scheme(mode: str | None, k: str | None, v: str | None, path: str = "") -> None:
    """Refuse names that are no scheme or codec; raises PolicyError at the key below *path*."""
    prefix = f"{path}." if path else ""
    key = "mode"
    try:
        if mode is not None:
            parse_scheme(mode)
        for key, name in (("k", k), ("v", v)):
            if name is not None:
                parse_codec(name, key)
    except UnknownSchemeError as error:
        raise PolicyError(f"{prefix}{key}", str(error), hint=error.hint) from error


def matching(match: Match, layers: Sequence[Layer], path: str) -> frozenset[int]:
    """Return the indices of the layers that *match* means.

    `first:` and `last:` count the layers that hold a KV cache of their own.

    Raises:
        PolicyError: it means no layer, or one that the model does not have.
    """
    cached = [
        layer.index for layer in layers if layer.kind not in (LayerKind.RECURRENT, LayerKind.SHARED)
    ]
    wanted: Sequence[int]
    if isinstance(match, list):
        wanted = match
    elif found := _RANGE.fullmatch(match):
        wanted = range(int(found[1]), int(found[2]) + 1)
    elif found := _ENDS.fullmatch(match):
        count = int(found[2])
        ends = cached[:count] if found[1] == "first" else cached[-count:]
        wanted = ends if count <= len(cached) else []
    elif match == "all":
        wanted = range(len(layers))
    else:
        wanted = [layer.index for layer in layers if layer.kind == match]
    if not wanted or min(wanted) < 0 or max(wanted) >= len(layers):
        raise PolicyError(path, f"no such layers: {_shown(match)}", hint=_inventory(layers))
    return frozenset(wanted)


def _check_tiles(tokens: int | None, path: str, done: str) -> None:
    """Refuse *tokens* that are not whole tiles; tokens are *done* by tiles."""
    if tokens is not None and tokens % TILE_TOKENS:
        below = tokens // TILE_TOKENS * TILE_TOKENS
        raise PolicyError(
            path,
            f"{tokens} is not a multiple of {TILE_TOKENS}: tokens are {done} by tiles of {TILE_TOKENS}",
            hint=f"write {below} or {below + TILE_TOKENS}",
        )


def _check_match(match: Match, path: str) -> None:
    if isinstance(match, list):
        known = bool(match) and min(match) >= 0
    elif found := _RANGE.fullmatch(match):
        known = int(found[1]) <= int(found[2])
    else:
        known = match in ("all", "full", "sliding") or _ENDS.fullmatch(match) is not None
    if not known:
        raise PolicyError(path, f"{_shown(match)} means no layers", hint=f"write {_FORMS}")


def _shown(match: Match) -> str:
    return str(match) if isinstance(match, list) else f'"{match}"'


def _inventory(layers: Sequence[Layer]) -> str:
    """Return what there is to match: "this model has layers 0-27: 28 full"."""
    kinds = [(kind, sum(layer.kind is kind for layer in layers)) for kind in LayerKind]
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds if count)
    return f"this model has layers 0-{len(layers) - 1}: {counts}"
