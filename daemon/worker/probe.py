"""Say what MLX computes on, as one JSON object, and exit: the supervisor asks, because it never loads MLX."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping

import mlx.core as mx


def probe() -> dict[str, object]:
    """Return device, its name, the bytes of memory that it has or should use (null: the machine's), and versions."""
    return {
        **describe(_kind(), mx.device_info()),
        "versions": {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")},
    }


def describe(kind: str, info: Mapping[str, str | int]) -> dict[str, object]:
    """Return what *info*, of a device of *kind*, says about its memory."""
    memory = {"cuda": "total_memory", "metal": "max_recommended_working_set_size"}.get(kind)
    return {
        "device": kind,
        "name": str(info.get("device_name", kind)),
        "memory_bytes": info.get(memory) if memory else None,
    }


def _kind() -> str:
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
