"""Write small files so that a crash or a power cut leaves the old one or the new one, never a part."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace *path* with *data*, mode 0600, on disk before this returns."""
    make_private(path.parent)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames within *folder* last."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(folder: Path) -> None:
    """Create *folder*, and what is missing above it, for this user alone; one that exists stays as it is."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def read_json(path: Path) -> object:
    """Return the document in *path*; None when there is none, or it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
