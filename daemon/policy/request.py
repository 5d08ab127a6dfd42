"""What a server asks for: its kv block, merged with the policy that it names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from daemon.errors import PolicyError
from daemon.policy.matching import check_fold, check_pair, check_rules, check_scheme, check_tail
from daemon.policy.schemes import (
    DEFAULT_WINDOW,
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

_SIDE_KEYS = ("cache_type_v", "cache_type_k", "v", "k")  # what may change one side alone
_EASILY_MISREAD = {
    "turbo3": "turbo3 means turbo0v3 here, keys in full precision; for 3-bit keys too write turbo3v3",
    "turbo3.5": "turbo3.5 means turbo3v4 here, 3-bit keys and 4-bit values; for 3.5 bits each write turbo3.5v3.5",
}

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
