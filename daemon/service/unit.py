"""What a service's file says: the shipped template with real paths, and whether somebody has changed it since.

All settings live in servers.yaml; the file holds paths, and the time that a stop may take. Its last line is a
checksum of the rest, by which a later installation knows a file that nobody has edited.
"""

from __future__ import annotations

import hashlib
import plistlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal
from xml.parsers.expat import ExpatError
from xml.sax.saxutils import escape

from daemon.config.spec import ServerSpec
from daemon.errors import TqdError
from daemon.resources import shipped

STOP_MARGIN_S = 30  # for the daemon itself, after its last worker is gone
CHECKSUM = "tqd service install: sha256"
_CHECKSUM_LINE = re.compile(rf"^(?:# |<!-- ){CHECKSUM} ([0-9a-f]{{64}})(?: -->)?\n\Z", re.MULTILINE)


class Scope(StrEnum):
    """Whose services: those of one user, or of the machine."""

    USER = "user"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Paths:
    """What a unit is filled in with. *user* is the account that a service of the machine runs as."""

    python: str
    config: Path
    state: Path
    home: Path
    environment: Mapping[str, str]
    stop_s: int
    user: str


@dataclass(frozen=True, slots=True)
class Installed:
    """What a unit on disk runs, and how long its stop may take, as far as it can be told."""

    python: Path | None = None
    config: Path | None = None
    state: Path | None = None
    stop_s: int | None = None


def stop_s(servers: Mapping[str, ServerSpec]) -> int:
    """Return how long a service manager must wait for a daemon of *servers* to end, in seconds."""
    specs = [*servers.values(), ServerSpec(model="-", port=1)]  # the defaults, for servers to come
    return round(max(it.drain_timeout + it.stop_grace for it in specs)) + STOP_MARGIN_S


def systemd_unit(paths: Paths, scope: Scope) -> str:
    """Return the unit for systemd."""
    values = {
        # the program is not subject to the expansion of variables, and the folder not to that of quotes
        "PYTHON": _systemd_word(paths.python),
        "CONFIG": _systemd_word(str(paths.config)).replace("$", "$$"),
        "STATE": _systemd_word(str(paths.state)).replace("$", "$$"),
        "HOME": str(paths.home).replace("%", "%%"),
        "ENVIRONMENT": "\n".join(
            f"Environment={_systemd_word(f'{name}={value}')}"
            for name, value in paths.environment.items()
        ),
    }
    text = _filled(f"systemd/{scope}/tqd.service", paths, values)
    return f"{text}# {CHECKSUM} {_digest(text)}\n"


def launchd_plist(paths: Paths, scope: Scope) -> str:
    """Return the property list for launchd."""
    values = {
        "PYTHON": escape(paths.python),
        "CONFIG": escape(str(paths.config)),
        "STATE": escape(str(paths.state)),
        "HOME": escape(str(paths.home)),
        "ENVIRONMENT": "\n".join(
            f"    <key>{escape(name)}</key>\n    <string>{escape(value)}</string>"
            for name, value in paths.environment.items()
        ),
    }
    text = _filled(f"launchd/{scope}/org.tqd.daemon.plist", paths, values)
    return f"{text}<!-- {CHECKSUM} {_digest(text)} -->\n"


def _filled(template: str, paths: Paths, values: Mapping[str, str]) -> str:
    given = [paths.python, paths.config, paths.state, paths.home, *paths.environment.values()]
    if broken := next((it for it in map(str, given) if not it.isprintable()), None):
        raise TqdError(f"{broken!r} cannot stand in a service's file: it has control characters")
    fixed = {"USER": paths.user, "STOP_S": str(paths.stop_s)}
    text = shipped(template).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda match: (fixed | {**values})[match[1]], text)


def is_edited(text: str) -> bool:
    """Whether the unit *text* is not exactly what an installation, of any version, has written."""
    match = _CHECKSUM_LINE.search(text)
    return match is None or match[1] != _digest(text[: match.start()])


Decision = Literal["new", "current", "outdated", "edited"]


def decide(found: str | None, rendered: str) -> Decision:
    """Return what the unit *found* on disk is, compared with what would be written."""
    if found is None:
        return "new"
    if found == rendered:
        return "current"
    return "edited" if is_edited(found) else "outdated"


def read_systemd(text: str) -> Installed:
    """Return what the unit *text* runs."""
    start = re.search(r"^ExecStart=(.+)$", text, re.MULTILINE)
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    try:
        words = shlex.split(start[1]) if start else []
    except ValueError:
        words = []
    return _installed(
        [word.replace("%%", "%").replace("$$", "$") for word in words],
        int(stop[1]) if stop else None,
    )


def read_launchd(text: str) -> Installed:
    """Return what the property list *text* runs."""
    try:
        job = plistlib.loads(text.encode())
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return Installed()
    if not isinstance(job, dict):
        return Installed()
    words, stop = job.get("ProgramArguments"), job.get("ExitTimeOut")
    return _installed(
        [str(word) for word in words] if isinstance(words, list) else [],
        stop if isinstance(stop, int) else None,
    )


def _installed(words: list[str], stop_s: int | None) -> Installed:
    def after(option: str) -> Path | None:
        at = words.index(option) + 1 if option in words else len(words)
        return Path(words[at]) if at < len(words) else None

    python = Path(words[0]) if words else None
    return Installed(python, after("--config"), after("--state-dir"), stop_s)


def _systemd_word(text: str) -> str:
    """Return *text* as one word of a unit."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if re.search(r"[^\w@%+=:,./-]", text) else text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
