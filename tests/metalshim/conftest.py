from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.metalshim import shim

Run = Callable[..., mx.array]

# what most bodies begin with: the names i (in the threadgroup), g (in the grid) and lane
NAMES = """\
uint i = thread_position_in_threadgroup.x;
uint g = thread_position_in_grid.x;
uint lane = thread_index_in_simdgroup;
"""


@pytest.fixture
def run() -> Run:
    """Run a body on x = 0, 1, … 255 with one output of 64 values."""

    def run(
        body: str,
        mode: str = "check",
        *,
        order: str = "forward",
        threads: int = 64,
        group: int = 64,
        dtype: mx.Dtype = mx.float32,
        **options: Any,
    ) -> mx.array:
        with shim.installed(mode, order):
            kernel = mx.fast.metal_kernel(
                name="f", input_names=["x"], output_names=["out"], source=NAMES + body, **options
            )
            out: mx.array = kernel(
                inputs=[mx.arange(256).astype(mx.float32)],
                output_shapes=[(64,)],
                output_dtypes=[dtype],
                grid=(threads, 1, 1),
                threadgroup=(group, 1, 1),
            )[0]
        return out

    return run
