"""Keep copies of the last configuration that was accepted, for a cold start with a broken file.

A copy is what the user wrote: references to the environment stay references. Each configuration has a
folder of its own, named by its hash; the file ``current`` names the newest complete one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from daemon.config.load import POLICY_FOLDER, Loaded, load
from daemon.errors import ConfigError
from daemon.supervisor.files import read_json, write_private

_CURRENT = "current"
_INDEX = "index.json"


class LastGood:
    """The copies in the folder *root*; *environ* answers the references in them."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root = root
        self._environ = environ

    def save(self, path: Path, files: Sequence[Path], content_hash: str) -> bool:
        """Copy *files*, which make up the configuration *path*.

        Returns False, and keeps what there was, when they no longer are what *content_hash* says: a
        newer edit is on its way.
        """
        name = content_hash[:16]
        if self._current() == name:
            return True
        folder = self.root / name
        index = {}
        try:
            for number, file in enumerate(files):
                in_policies = file.parent == path.parent / POLICY_FOLDER
                copy = f"{POLICY_FOLDER}/{file.name}" if in_policies else f"{number}-{file.name}"
                write_private(folder / copy, file.read_bytes())
                index[str(file)] = copy
            write_private(folder / _INDEX, json.dumps(index, indent=1).encode())
            if load(path, environ=self._environ, copies=_copies(path, folder)).content_hash != (
                content_hash
            ):
                return False
            write_private(self.root / _CURRENT, name.encode())
        except (OSError, ConfigError):
            return False
        finally:
            self._clean()
        return True

    def load(self, path: Path) -> Loaded | None:
        """Return the last good configuration of *path*; None when there is none, or it is good no more."""
        name = self._current()
        if name is None:
            return None
        try:
            copies = _copies(path, self.root / name)
            return load(path, environ=self._environ, copies=copies) if path in copies else None
        except ConfigError:
            return None

    def _current(self) -> str | None:
        try:
            return (self.root / _CURRENT).read_text()
        except OSError:
            return None

    def _clean(self) -> None:
        """Remove every folder but the current one."""
        current = self._current()
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            if folder.is_dir() and folder.name != current:
                shutil.rmtree(folder, ignore_errors=True)


def _copies(path: Path, folder: Path) -> dict[Path, Path]:
    index = read_json(folder / _INDEX)
    entries = index.items() if isinstance(index, dict) else ()
    copies = {Path(file): folder / copy for file, copy in entries}
    return copies | {path.parent / POLICY_FOLDER: folder / POLICY_FOLDER}
