"""Run one operation of MLX in this process and say where it ran."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time

import mlx.core as mx

from daemon.config.context import MlxContext
from daemon.worker.probe import default_device

_SIZE = 512
_PACKAGES = (
    "tqd",
    "mlx",
    "mlx-lm",
    "mlx-metal",
    "mlx-cpu",
    "mlx-cuda-12",
    "mlx-cuda-13",
    "transformers",
)


def examine() -> MlxContext:
    """Multiply two matrices whose product is known, on the default device."""
    a = mx.broadcast_to(mx.arange(_SIZE, dtype=mx.float32)[None], (_SIZE, _SIZE))
    identity = mx.eye(_SIZE)
    mx.eval(a @ identity)  # the first use of a device loads its library
    started = time.perf_counter()
    product = a @ identity
    mx.eval(product)
    multiply_ms = (time.perf_counter() - started) * 1000
    device = default_device()
    return MlxContext(
        device=device["device"],
        device_name=device["name"],
        memory_bytes=device["memory_bytes"],
        multiply_ms=round(multiply_ms, 3),
        correct=bool(mx.array_equal(product, a)),
        versions={name: version for name in _PACKAGES if (version := _version(name))},
        python=platform.python_version(),
        executable=sys.executable,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
