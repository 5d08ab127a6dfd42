"""Chains of elementwise operations as one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import cast

import mlx.core as mx

# Sequences grow by a tile at a time, so each shape serves 32 steps: some for each row of a batch are enough.
_SHAPES = 64

Chain = Callable[..., mx.array]


def fused(chain: Chain) -> Chain:
    """Return *chain*, of one array or of several of the same shape, compiled for each shape that it meets.

    Compiled for all shapes at once, every constant is broadcast at run time and counts towards the 11
    operations that MLX (0.32.4) fuses at most; longer chains fall into pieces that all go through
    memory, several times as slow on a CPU. A chain should be no deeper than that.
    """

    @lru_cache(maxsize=_SHAPES)
    def compiled(_shape: tuple[int, ...]) -> Chain:
        # MLX knows a compiled function by its identity: each shape needs one of its own to be forgotten alone
        return cast("Chain", mx.compile(partial(chain)))

    return lambda *arrays: compiled(arrays[0].shape)(*arrays)
