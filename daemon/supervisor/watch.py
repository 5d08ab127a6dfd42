"""Notice that servers.yaml, an include or a policy has changed, whatever way it was saved.

The truth is a stat of every file once a second: renames, symlink swaps, bind mounts, network disks
and writes within one second all show there. The system's own notifications, where they work, only
make that look come sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from daemon.log import get_logger
from daemon.supervisor.intake import POLL_S, Look, Stat

# It complains of its own threads when they stop, in the middle of nowhere.
logging.getLogger("watchdog").setLevel(logging.ERROR)

_CHANGES = frozenset({"created", "modified", "moved", "deleted", "closed"})


def look(files: Iterable[Path]) -> Look:
    """Return what identifies the content of each file short of reading it; None for one that is not there."""
    return {path: _stat(path) for path in files}


def _stat(path: Path) -> Stat:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


class FolderWatch:
    """Calls *nudge*, from *loop*, when something happens in the observed folders, as far as the system tells."""

    def __init__(self, loop: asyncio.AbstractEventLoop, nudge: Callable[[], None]) -> None:
        self._loop = loop
        self._tell = nudge
        self._folders: frozenset[Path] = frozenset()
        self._observer: BaseObserver | None = None
        self._log = get_logger()

    def observe(self, folders: frozenset[Path]) -> None:
        """Observe *folders* instead of the ones before; what cannot be observed is polled all the same."""
        existing = frozenset(folder for folder in folders if folder.is_dir())
        if existing == self._folders:
            return
        self.stop()
        self._folders = existing
        observer = Observer()
        try:
            for folder in existing:
                observer.schedule(_Nudge(self._nudge), str(folder))
            observer.start()
        except OSError as error:  # out of inotify instances or watches
            self._log.warning("watch.unavailable", error=str(error), poll_s=POLL_S)
            return
        self._observer = observer

    def stop(self) -> None:
        """Observe nothing."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
            observer.join(timeout=1)

    def _nudge(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._tell)


class _Nudge(FileSystemEventHandler):
    """Forwards events that can mean a change; opening and reading, our own included, cannot."""

    def __init__(self, nudge: Callable[[], None]) -> None:
        self._nudge = nudge

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Nudge, from the observer's thread."""
        if event.event_type in _CHANGES:
            self._nudge()
