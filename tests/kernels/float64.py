"""Arrays in float64, in which kernels are judged."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

Float = np.ndarray[Any, np.dtype[np.float64]]


def wide(x: mx.array) -> Float:
    """Return *x* in float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)
