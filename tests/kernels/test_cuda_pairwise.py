"""Every two properties of a CUDA kernel's variants compile together, where nvcc is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from daemon.kernels import order
from daemon.policy.schemes import (
    FP16,
    INT8,
    TRELLIS3,
    TURBO2,
    TURBO3,
    TURBO3_5,
    TURBO4,
    TURBO5,
)  # fmt: skip
from tests.kernels.pairwise import pairwise
from tests.kernels.test_cuda_sources import (
    VARIANTS,
    compiled,
    encode_text,
    fast_text,
    fold_text,
    scan_text,
)

K_BITS, V_BITS = [8, 5, 4, 3, 2], [8, 4, 3, 2]
TYPES = ["__half", "__nv_bfloat16", "float"]
FAST = pairwise({
    "dim": [64, 128], "grouped": [1, 4, 5, 8], "k_bits": K_BITS, "v_bits": V_BITS, "rotary": [False, True],
    "kind": TYPES, "rows": [1, 8, 64],
})  # fmt: skip
GENERAL = pairwise(
    {
        "dims": [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)],
        "k": [FP16, INT8, TURBO5, TURBO4, TURBO3_5, TURBO3, TRELLIS3, TURBO2],
        "v": [FP16, INT8, TURBO4, TURBO3_5, TURBO3, TRELLIS3, TURBO2],
        "masked": [False, True],
    },
    lambda row: (row.get("k"), row.get("v")) != (FP16, FP16),
)  # fmt: skip
ENCODING = pairwise({"dim": [64, 128], "k_bits": K_BITS, "v_bits": V_BITS, "kind": TYPES})
FOLDING = pairwise({
    "dim": [64, 128], "k_bits": K_BITS, "v_bits": V_BITS, "kind": TYPES, "step": [1, 2],
})  # fmt: skip

KERNELS = {
    "fast": [fast_text(**row) for row in FAST],
    "general": [
        scan_text(row["dims"], (row["k"], row["v"]), order.CANONICAL, row["masked"])
        for row in GENERAL
    ],
    "encoding": [encode_text(**row) for row in ENCODING],
    "folding": [fold_text(**row) for row in FOLDING],
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", KERNELS)
def test_every_two_properties_of_a_kernel_compile_together(name: str, tmp_path: Path) -> None:
    kernels = [
        text.replace("void ", f"void v{at}_", 1) for at, text in enumerate(KERNELS[name])
    ]  # each name once
    ptx = compiled(VARIANTS[name][0], kernels, tmp_path)
    assert ptx.count(".visible .entry") == len(kernels)
