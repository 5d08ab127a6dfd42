"""The Metal sources, and the kernels that MLX compiles around them."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from functools import cache
from typing import cast

import mlx.core as mx

_Kernel = Callable[..., list[mx.array]]


@cache
def turn_kernel() -> _Kernel:
    """Return the kernel that makes of queries what the first pass wants."""
    return _kernel(
        "turn",
        inputs=("queries", "basis", "scales", "mean", "channels", "pairs", "factor"),
        outputs=("packed", "plain", "coefficients", "constants"),
    )


@cache
def attend_kernel() -> _Kernel:
    """Return the first pass of attention."""
    return _kernel(
        "attend",
        inputs=(
            "sizes", "packed_queries", "plain_queries", "tiles", "k_head", "k_tail", "v_head", "v_tail",
            "k_centroids", "v_centroids", "mask", "coefficients", "constants", "angles", "offsets",
            "negligible",
        ),
        outputs=("sums", "states"),
        header=source("trellis") + source("codes"),
    )  # fmt: skip


@cache
def merge_kernel() -> _Kernel:
    """Return the second pass of attention."""
    return _kernel("merge", inputs=("sizes", "sums", "states", "sinks", "basis"), outputs=("out",))


@cache
def encode_kernel() -> _Kernel:
    """Return the kernel that rounds and packs whole tiles."""
    return _kernel(
        "encode",
        inputs=(
            "sizes", "k", "v", "k_thresholds", "v_thresholds", "k_centroids", "v_centroids", "stretches",
            "old",
        ),
        outputs=("tiles",),
        header=source("trellis") + source("vectors"),
    )  # fmt: skip


@cache
def restore_kernel() -> _Kernel:
    """Return the kernel that unpacks one side of a row."""
    return _kernel(
        "restore",
        inputs=(
            "sizes", "tiles", "head", "tail", "centroids", "basis", "scales", "mean", "channels", "angles",
        ),
        outputs=("out",),
        header=source("trellis") + source("codes"),
    )  # fmt: skip


def _kernel(
    name: str, *, inputs: tuple[str, ...], outputs: tuple[str, ...], header: str = ""
) -> _Kernel:
    made = mx.fast.metal_kernel(
        name=f"tqd_{name}",
        input_names=inputs,
        output_names=outputs,
        source=source(name),
        header=header,
        ensure_row_contiguous=False,  # a side in full precision has spare room: it must not be copied at every step
    )
    return cast("_Kernel", made)


def source(name: str) -> str:
    """Return the text of a source file."""
    return (importlib.resources.files(__package__) / f"{name}.metal").read_text("utf-8")
