"""Find the files that ship with tqd: policies, unit templates, the example configuration."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """Return the path of the shipped file or folder *name*, such as ``policies``.

    A wheel holds them under ``daemon/data``; a checkout holds them at its top level.

    Raises:
        FileNotFoundError: neither place has it; the installation is broken.
    """
    for folder in (_PACKAGE / "data", _PACKAGE.parent):
        path = folder / name
        if path.exists():
            return path
    raise FileNotFoundError(f"{name} is missing from this installation of tqd")
