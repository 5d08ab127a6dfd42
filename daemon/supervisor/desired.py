"""Remember what the user wants of each server: `tqd stop` outlives an edit, a restart and a reboot."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from daemon.config.spec import ServerSpec
from daemon.log import get_logger
from daemon.supervisor.files import read_json, write_private
from daemon.supervisor.server import Desired


class DesiredState:
    """The user's word on each server, kept in *path*; servers without one follow the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        document = read_json(path)
        known = {it.value for it in Desired}
        entries = document.items() if isinstance(document, dict) else ()
        self._said = {name: Desired(value) for name, value in entries if value in known}

    def of(self, name: str, spec: ServerSpec) -> Desired:
        """Return what server *name* is meant to be."""
        if not spec.enabled:
            return Desired.STOPPED
        return self._said.get(name, Desired.RUNNING if spec.autostart else Desired.STOPPED)

    def source(self, name: str) -> str:
        """Return who decided: ``cli`` or ``config``."""
        return "cli" if name in self._said else "config"

    def say(self, names: Collection[str], desired: Desired) -> None:
        """Remember the user's word on *names*."""
        self._write(self._said | dict.fromkeys(names, desired))

    def forget(self, names: Collection[str]) -> None:
        """Drop the word on servers that left the file."""
        if not self._said.keys().isdisjoint(names):
            self._write({name: it for name, it in self._said.items() if name not in names})

    def _write(self, said: dict[str, Desired]) -> None:
        self._said = said
        try:
            write_private(self._path, json.dumps(said, indent=1).encode())
        except (
            OSError
        ) as error:  # a full disk: true until the daemon ends, which is better than not at all
            get_logger().error("state.not_written", path=str(self._path), error=error.strerror)
