"""Run one operation of MLX in this process and say where it ran."""

from __future__ import annotations

import platform
import sys
import time

import mlx.core as mx

from daemon.config.context import MlxContext, installed
from daemon.worker.probe import default_device

_SIZE = 512


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
        versions=installed(),
        python=platform.python_version(),
        executable=sys.executable,
    )
