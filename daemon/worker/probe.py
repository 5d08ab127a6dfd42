"""Say what MLX computes on, as one JSON object, and exit: the supervisor asks, because it never loads MLX."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from typing import TypedDict

import mlx.core as mx


class Device(TypedDict):
    """What MLX computes on; *memory_bytes* is what the device has or should use, None: the machine's."""

    device: str
    name: str
    memory_bytes: int | None


def probe() -> dict[str, object]:
    """Return the device and versions."""
    versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
    return {**default_device(), "versions": versions}


def default_device() -> Device:
    """Return what MLX's default device is."""
    return describe(_kind(), mx.device_info())


def describe(kind: str, info: Mapping[str, str | int]) -> Device:
    """Return what *info*, of a device of *kind*, says about its memory."""
    key = {"cuda": "total_memory", "metal": "max_recommended_working_set_size"}.get(kind, "")
    return {
        "device": kind,
        "name": str(info.get("device_name", kind)),
        "memory_bytes": int(info[key]) if key in info else None,
    }


def _kind() -> str:
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
