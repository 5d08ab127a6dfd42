"""What a whole configuration must satisfy beyond the type of each key; pure, one function per rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Set

from daemon.config.address import (
    EVERY_ADDRESS,
    bind_group,
    is_host,
    is_loopback,
    parse_endpoint,
)
from daemon.config.read import ENVIRONMENT_MISFIT, unknown_key
from daemon.config.source import Source
from daemon.config.spec import DaemonSpec, ServerSpec
from daemon.errors import PolicyError, Problem
from daemon.policy.matching import check_fold, check_rules, check_tail
from daemon.policy.schemes import UnknownSchemeError, parse_cache_type, parse_codec, parse_scheme
from daemon.policy.spec import KvSpec, LayerRule


def daemon_problems(daemon: DaemonSpec, source: Source) -> Iterator[Problem]:
    """Yield what is wrong with the daemon block: an endpoint that is none, or open to the network."""
    if daemon.status is None:
        return
    try:
        endpoint = parse_endpoint(daemon.status)
    except ValueError as error:
        yield source.problem("status", str(error), "null turns it off")
        return
    if not is_loopback(endpoint.host):
        yield source.problem(
            "status",
            "the ops endpoint has no keys, so it listens on a loopback address only",
            "write 127.0.0.1:8700, and put a proxy that checks who asks in front of it",
        )


def server_problems(
    spec: ServerSpec, source: Source, refused: Set[str] = frozenset()
) -> Iterator[Problem]:
    """Yield what is wrong with one server, whatever the others say.

    *refused* are the keys that were reported already; *spec* has their defaults.
    """
    if not is_host(spec.host):
        hint = "the port goes into `port`" if spec.host.count(":") == 1 else "such as 127.0.0.1"
        yield source.problem("host", "expected an IP address or a host name", hint)
    elif not is_loopback(spec.host) and spec.api_key is None and not _below(refused, "api_key"):
        yield source.problem(
            "host", "other machines can reach this host, and there is no api_key",
            "add `api_key: ${env:NAME}`, or listen on 127.0.0.1",
        )  # fmt: skip
    if spec.api_key == "":
        yield source.problem("api_key", "the key is empty", "null means open")
    first, longest = spec.restart.backoff
    if first > longest:
        yield source.problem(
            "restart.backoff", "the first delay is longer than the longest", "[1s, 60s]"
        )
    for path, seconds in (
        ("probe.interval", spec.probe.interval),
        ("restart.window", spec.restart.window),
    ):
        if seconds <= 0:
            yield source.problem(path, "expected more than 0s")
    yield from kv_problems(spec.kv, source, refused)


def _below(paths: Set[str], key: str) -> bool:
    return any(path == key or path.startswith(f"{key}.") for path in paths)


def kv_problems(kv: KvSpec, source: Source, refused: Set[str] = frozenset()) -> Iterator[Problem]:
    """Yield what is wrong with a kv block whatever the model: names of no scheme, rules that set nothing."""
    yield from _scheme_problems(kv, "kv", source)
    yield from _unknown_scheme(_k_cache_type, kv.cache_type_k, "kv.cache_type_k", source)
    yield from _unknown_scheme(_v_cache_type, kv.cache_type_v, "kv.cache_type_v", source)
    yield from _refused_by(lambda: check_tail(kv.tail_tokens, "tail_tokens"), source)
    yield from _refused_by(lambda: check_fold(kv.fold_tokens, "fold_tokens"), source)
    for index, rule in enumerate(kv.layers or ()):
        yield from _scheme_problems(rule, f"kv.layers.{index}", source)
        if not _below(refused, f"kv.layers.{index}"):
            yield from _refused_by(functools.partial(check_rules, [rule]), source, index)


def _refused_by(
    check: Callable[[], None], source: Source, rule: int | None = None
) -> Iterator[Problem]:
    """Yield what *check* refuses; *rule* is the index of the layer rule that stands first in it."""
    try:
        check()
    except PolicyError as error:
        path = f"kv.{error.path}"
        if rule is not None:
            path = path.replace("kv.layers.0", f"kv.layers.{rule}", 1)
        if source.hides(path):
            yield source.problem(path, ENVIRONMENT_MISFIT)
        else:
            yield source.problem(path, error.message, error.hint)


def policy_problems(kv: KvSpec, source: Source, known: tuple[str, ...]) -> Iterator[Problem]:
    """Yield the policy name of a kv block when there is no such policy."""
    if kv.policy not in known:
        _, hint = unknown_key(kv.policy, known)
        if source.hides("kv.policy"):
            yield source.problem("kv.policy", ENVIRONMENT_MISFIT, f"one of {', '.join(known)}")
        else:
            yield source.problem("kv.policy", f'unknown policy "{kv.policy}"', hint)


def _scheme_problems(block: KvSpec | LayerRule, path: str, source: Source) -> Iterator[Problem]:
    yield from _unknown_scheme(parse_scheme, block.mode, f"{path}.mode", source)
    yield from _unknown_scheme(_k_codec, block.k, f"{path}.k", source)
    yield from _unknown_scheme(_v_codec, block.v, f"{path}.v", source)


_k_codec = functools.partial(parse_codec, side="k")
_v_codec = functools.partial(parse_codec, side="v")
_k_cache_type = functools.partial(parse_cache_type, side="k")
_v_cache_type = functools.partial(parse_cache_type, side="v")


def _unknown_scheme(
    parse: Callable[[str], object], name: str | None, path: str, source: Source
) -> Iterator[Problem]:
    if name is None:
        return
    try:
        parse(name)
    except UnknownSchemeError as error:
        if source.hides(path):
            yield source.problem(path, ENVIRONMENT_MISFIT)
        else:
            yield source.problem(path, str(error), error.hint)


def name_problems(
    servers: Mapping[str, ServerSpec], sources: Mapping[str, Source]
) -> Iterator[Problem]:
    """Yield the aliases that already mean another server; a disabled server keeps its names."""
    taken = {name: f"the name of {sources[name].path}" for name in servers}
    for name, spec in servers.items():
        for index, alias in enumerate(spec.aliases):
            path = f"aliases.{index}"
            if not alias:
                yield sources[name].problem(path, "an alias is empty")
            elif alias in taken:
                shown = "this alias" if sources[name].hides(path) else f'alias "{alias}"'
                yield sources[name].problem(path, f"{shown} is already {taken[alias]}")
            else:
                taken[alias] = f"an alias of {sources[name].path}"


def port_problems(
    servers: Mapping[str, ServerSpec], sources: Mapping[str, Source], daemon: DaemonSpec
) -> Iterator[Problem]:
    """Yield the ports that two enabled servers, or a server and the ops endpoint, would share."""
    taken: dict[int, dict[str, str]] = {}
    if daemon.status is not None:
        try:
            status = parse_endpoint(daemon.status)
        except ValueError:
            pass  # reported with the daemon block
        else:
            taken[status.port] = {bind_group(status.host): "daemon.status"}
    for name, spec in servers.items():
        if not spec.enabled:
            continue
        here, group = taken.setdefault(spec.port, {}), bind_group(spec.host)
        other = here.get(group) or here.get(EVERY_ADDRESS)
        if other is None and group == EVERY_ADDRESS and here:
            other = next(iter(here.values()))
        if other is None:
            here[group] = sources[name].path
            continue
        shown = "this port" if sources[name].hides("port") else f"port {spec.port}"
        place = (
            sources[other.removeprefix("servers.")].place("port")
            if other != "daemon.status"
            else None
        )
        used = f"{other} ({place})" if place else other
        yield sources[name].problem(
            "port", f"{shown} is already used by {used}", "choose another port"
        )
