"""The configuration in force, as `GET /v1/config` shows it: defaults filled in, secrets hidden, places named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from daemon.config.effects import leaves
from daemon.config.load import Loaded
from daemon.config.source import Source

HIDDEN = "«hidden»"


class AppliedServer(TypedDict):
    """One entry; *places* says which file and line each written key comes from, the rest are defaults."""

    place: str
    values: Mapping[str, object]
    places: Mapping[str, str]


class AppliedConfig(TypedDict):
    """The document of ``GET /v1/config``; values are by dotted key."""

    path: str
    generation: int
    content_hash: str
    files: list[str]
    daemon: AppliedServer
    servers: Mapping[str, AppliedServer]


def applied(loaded: Loaded, generation: int) -> AppliedConfig:
    """Return what *loaded* says and means."""
    entries = loaded.servers.servers
    return {
        "path": str(loaded.servers.path),
        "generation": generation,
        "content_hash": loaded.content_hash,
        "files": [str(path) for path in loaded.files],
        "daemon": _entry(leaves(loaded.servers.daemon), loaded.daemon_source),
        "servers": {name: _entry(leaves(it), loaded.sources[name]) for name, it in entries.items()},
    }


def _entry(values: Mapping[str, object], source: Source) -> AppliedServer:
    return {
        "place": str(source.entry),
        "values": {path: _shown(value, source, path) for path, value in values.items()},
        "places": {path: str(it) for path in values if (it := source.place_of(path))},
    }


def _shown(value: object, source: Source, path: str) -> object:
    if path in source.hidden:
        return HIDDEN
    if isinstance(value, list):
        return [_shown(item, source, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _shown(item, source, f"{path}.{name}") for name, item in value.items()}
    return HIDDEN if value is not None and source.hides(path) else value
