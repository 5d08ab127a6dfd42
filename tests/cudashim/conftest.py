from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.cudashim import shim

Run = Callable[..., mx.array]


# what most bodies begin with: the thread's names, and hopper.cuh around them
HEADER = """\
#include "{folder}/common.cuh"
#include "{folder}/hopper.cuh"
using namespace tqd;
"""
NAMES = "const int i = threadIdx.x, lane = i % 32, g = blockIdx.x * blockDim.x + i;\n"


@pytest.fixture
def run() -> Run:
    """Run a body on x = 0, 1, … 255 with one output of 64 values; 256 bytes of `shared` where it is declared."""
    from daemon.kernels.cuda import sources

    def run(
        body: str,
        mode: str = "check",
        *,
        order: str = "forward",
        threads: int = 64,
        block: int = 64,
        dtype: mx.Dtype = mx.float32,
        x: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        with shim.installed(mode, order):
            kernel = mx.fast.cuda_kernel(
                name="f",
                input_names=["x"],
                output_names=["out"],
                header=HEADER.format(folder=sources.FOLDER),
                source=NAMES + body,
                shared_memory=256,
                **options,
            )
            out: mx.array = kernel(
                inputs=[mx.arange(256).astype(mx.float32) if x is None else x],
                output_shapes=[(64,)],
                output_dtypes=[dtype],
                grid=(threads, 1, 1),
                threadgroup=(block, 1, 1),
            )[0]
        return out

    return run
