"""The one place where tqd reaches into mlx-lm: attention on our views goes to our caches.

Every model module of mlx-lm imports `scaled_dot_product_attention` from `mlx_lm.models.base`. Rebinding
it there before any model module is imported covers them all; modules that are already loaded hold
their own reference and are rebound one by one. Calls on ordinary arrays go on to mlx-lm unchanged.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models import base

from daemon.cache.sequence import View

SUPPORTED_MLX_LM = "0.32.2"

_original = base.scaled_dot_product_attention


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as mlx-lm's own function does, or through our cache where *keys* is one of its views."""
    if isinstance(keys, View):
        return keys.cache.attend(queries, scale, mask, sinks)
    out: mx.array = _original(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return out


def install() -> None:
    """Put the seam in place; calling it again changes nothing.

    Raises:
        RuntimeError: mlx-lm is another version than the one whose internals this build knows.
    """
    if mlx_lm.__version__ != SUPPORTED_MLX_LM:
        raise RuntimeError(f"this build knows mlx-lm {SUPPORTED_MLX_LM}, not {mlx_lm.__version__}")
    base.scaled_dot_product_attention = scaled_dot_product_attention
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("mlx_lm.models.")
            and getattr(module, "scaled_dot_product_attention", None) is _original
        ):
            module.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[attr-defined] # just found
