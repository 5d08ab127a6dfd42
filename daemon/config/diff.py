"""The difference between two prepared configurations, as steps; what `tqd diff` prints is what is done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from daemon.config.effects import DAEMON_EFFECTS, Effect, effect_of, leaves
from daemon.config.keys import SECRETS
from daemon.config.prepare import Prepared, PreparedServer
from daemon.errors import ConfigError

HIDDEN = "«changed»"
_UNSET = "null"
_SECRET = frozenset(name for _, name in SECRETS)


@dataclass(frozen=True, slots=True)
class Change:
    """One key and its values as a file would say them; secrets only say that they changed."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        if self.after == HIDDEN:
            return f"{self.path} {HIDDEN}"
        return f"{self.path} {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker: the entry is gone, or it is disabled now and *server* is what remains of it."""

    verb: ClassVar = "stop"
    name: str
    changes: tuple[Change, ...] = ()
    server: PreparedServer | None = None

    def __str__(self) -> str:
        return _line(self.verb, self.name, self.changes)


@dataclass(frozen=True, slots=True)
class _Step:
    verb: ClassVar[str]
    server: PreparedServer
    changes: tuple[Change, ...] = ()

    @property
    def name(self) -> str:
        """The server's name."""
        return self.server.name

    def __str__(self) -> str:
        return _line(self.verb, self.name, self.changes)


@dataclass(frozen=True, slots=True)
class Replace(_Step):
    """Drain the worker and start another one."""

    verb = "restart"


@dataclass(frozen=True, slots=True)
class Start(_Step):
    """A server to run that did not have to: a new entry, or one that was disabled or had no autostart."""

    verb = "start"


@dataclass(frozen=True, slots=True)
class Live(_Step):
    """Change what is in force without a restart."""

    verb = "live"


Step = Stop | Replace | Start | Live
_ORDER = (Stop, Replace, Start, Live)


def diff(
    running: Mapping[str, PreparedServer], wanted: Mapping[str, PreparedServer]
) -> tuple[Step, ...]:
    """Return the steps from *running* to *wanted*; equal meaning, however it is written, is no step.

    Stops come first, so that the memory and the ports they free are there for what follows. A disabled
    server counts as known but not running.
    """
    steps = [
        step
        for name in {**running, **wanted}
        if (step := _step(running.get(name), wanted.get(name)))
    ]
    return tuple(sorted(steps, key=lambda step: _ORDER.index(type(step))))


def _step(before: PreparedServer | None, after: PreparedServer | None) -> Step | None:
    if after is None:
        # a name out of the two mappings has one of both
        return Stop(before.name) if before is not None and before.spec.enabled else None
    if before is None:
        return Start(after) if after.spec.enabled else None
    if before == after:
        return None  # without a look at every key: most servers of most edits
    changes = tuple(_changes(before, after))
    match before.spec.enabled, after.spec.enabled:
        case True, False:
            return Stop(after.name, changes, after)
        case False, True:
            return Start(after, changes)
        case True, True if before.spec_hash != after.spec_hash:
            return Replace(after, changes)
        case True, True if after.spec.autostart and not before.spec.autostart:
            return Start(after, changes)
        case _:
            return Live(after, changes) if changes else None


def _changes(before: PreparedServer, after: PreparedServer) -> Iterator[Change]:
    """Yield every key that differs: what the file says, then what changed beside it."""
    old, new = leaves(before.spec), leaves(after.spec)
    changed = [path for path in old | new if old.get(path) != new.get(path)]
    for path in changed:
        if _is_hidden(path, before.hidden | after.hidden):
            yield Change(path, HIDDEN, HIDDEN)
        else:
            yield Change(path, _text(old.get(path)), _text(new.get(path)))
    if not _touches(changed, "api_key") and before.api_key != after.api_key:
        yield Change("api_key", HIDDEN, HIDDEN)  # the content of its file
    if not _touches(changed, "kv"):
        yield from _policy_changes(before, after)
    if "model" not in changed and _fingerprint(before) != _fingerprint(after):
        yield Change("model", _model(before), _model(after))
    if "max_context" not in changed and before.max_context != after.max_context:
        yield Change("max_context", _text(before.max_context), _text(after.max_context))


def _touches(paths: Iterable[str], key: str) -> bool:
    return any(path == key or path.startswith(f"{key}.") for path in paths)


def _is_hidden(path: str, hidden: Set[str]) -> bool:
    return path.partition(".")[0] in _SECRET or _touches(hidden, path)


def _policy_changes(before: PreparedServer, after: PreparedServer) -> Iterator[Change]:
    """Yield what another text of the named policy, or another allowlist, changes under the same keys."""
    old, new = leaves(before.kv), leaves(after.kv)
    for path in (path for path in old | new if old.get(path) != new.get(path)):
        yield Change(f"kv.{path}", _text(old.get(path)), _text(new.get(path)))
    if before.allowed != after.allowed:
        yield Change("kv (allowlist)", _allowance(before), _allowance(after))


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return _UNSET if value is None else json.dumps(value, ensure_ascii=False)


def _fingerprint(server: PreparedServer) -> str | None:
    return None if server.facts is None else server.facts.fingerprint


def _model(server: PreparedServer) -> str:
    known = _fingerprint(server)
    return "missing" if known is None else f"files {known[:12]}"


def _allowance(server: PreparedServer) -> str:
    return "4-bit keys allowed" if server.allowed else "4-bit keys not allowed"


def _line(verb: str, name: str, changes: tuple[Change, ...]) -> str:
    return f"{verb} {name}: {'; '.join(map(str, changes))}" if changes else f"{verb} {name}"


def refuse_daemon_changes(running: Prepared, wanted: Prepared) -> None:
    """Refuse an edit of the daemon block that only a new daemon can follow.

    Raises:
        ConfigError: with each such key; the whole edit is refused, so that file and process agree.
    """
    old, new = leaves(running.daemon), leaves(wanted.daemon)
    keys = [
        path
        for path in old | new
        if old.get(path) != new.get(path)
        and effect_of(path, DAEMON_EFFECTS) is Effect.DAEMON_RESTART
    ]
    if keys:
        raise ConfigError([
            wanted.daemon_source.problem(
                path,
                "a change of this key needs a daemon restart",
                "restart the daemon, or take the change back",
            )
            for path in keys
        ])  # fmt: skip
