"""What a change of each key does to a running server or daemon: one table, read by the diff and the hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from pydantic import BaseModel


class Effect(StrEnum):
    """What it takes for a change to be in force."""

    LIVE = "live"
    RESTART = "restart"
    DAEMON_RESTART = "daemon restart"


# A key without an entry of its own has the effect of the key above it; a test holds this table and the
# models together.
SERVER_EFFECTS: Mapping[str, Effect] = {
    "model": Effect.RESTART,
    "revision": Effect.RESTART,
    "adapter": Effect.RESTART,
    "draft_model": Effect.RESTART,
    "host": Effect.RESTART,
    "port": Effect.RESTART,
    "aliases": Effect.LIVE,
    "enabled": Effect.LIVE,  # decides whether there is a worker at all: the diff makes it a stop or a start
    "autostart": Effect.LIVE,
    "idle_unload": Effect.LIVE,
    "max_context": Effect.RESTART,
    "max_concurrent": Effect.LIVE,
    "queue": Effect.LIVE,
    "api_key": Effect.LIVE,
    "cors_origins": Effect.RESTART,
    "allowed_hosts": Effect.RESTART,
    "sampling": Effect.LIVE,
    "chat_template": Effect.RESTART,
    "trust_remote_code": Effect.RESTART,
    "env": Effect.RESTART,
    "python": Effect.RESTART,
    "kv": Effect.RESTART,
    "kv.budget": Effect.LIVE,
    "prompt_cache": Effect.LIVE,
    "prompt_cache.disk": Effect.RESTART,
    "restart": Effect.LIVE,
    "probe": Effect.LIVE,
    "drain_timeout": Effect.LIVE,
    "stop_grace": Effect.LIVE,
    "labels": Effect.LIVE,
    "distributed": Effect.RESTART,
}

DAEMON_EFFECTS: Mapping[str, Effect] = {
    "control": Effect.DAEMON_RESTART,
    "status": Effect.DAEMON_RESTART,
    "gateway": Effect.DAEMON_RESTART,
    "memory_budget": Effect.LIVE,
    "max_parallel_loads": Effect.LIVE,
    "reload": Effect.LIVE,
    "log": Effect.LIVE,
    "log.dir": Effect.DAEMON_RESTART,
    "log.format": Effect.DAEMON_RESTART,
}


def effect_of(path: str, effects: Mapping[str, Effect]) -> Effect:
    """Return the effect of the dotted key *path*: its own entry, else that of the nearest key above it."""
    while path not in effects:
        path, dot, _ = path.rpartition(".")
        if not dot:
            raise KeyError("no effect is known for this key")
    return effects[path]


def leaves(model: BaseModel) -> dict[str, object]:
    """Return every value of *model* by its dotted key, in the form that JSON has."""
    return dict(_leaves(model.model_dump(mode="json"), ""))


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    elif path and value != {}:
        yield path, value
