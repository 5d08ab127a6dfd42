"""What `tqd doctor` finds: how a thing is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from daemon.config.load import Loaded, load
from daemon.errors import ConfigError
from daemon.ops.document import Document
from daemon.paths import StateDir
from daemon.supervisor.client import Client

Verdict = Literal["ok", "warn", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    verdict: Verdict
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """What several topics need to know: the configuration, if it can be read, and the daemon, if it answers."""

    config: Path
    state: StateDir
    loaded: Loaded | None
    refused: ConfigError | None
    daemon: Document | None


def look_around(config: Path, state: StateDir, *, named: bool = True) -> Scene:
    """Return what there is; a running daemon's configuration rather than one that nobody *named*."""
    loaded, refused, daemon = None, None, Client(state).status_if_running()
    if daemon is not None and not named:
        config = Path(daemon["config"]["path"])
    try:
        loaded = load(config)
    except ConfigError as error:
        refused = error
    return Scene(config, state, loaded, refused, daemon)
