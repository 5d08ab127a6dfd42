"""mx.fast.cuda_kernel for a machine without an NVIDIA GPU: the same call, executed on the CPU.

Kernels run when they are called, not when their result is needed; and only while installed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from daemon.kernels.packing import native_layout
from tests.cudashim import compiler
from tests.cudashim.translate import translation, written_inputs
from tests.metalshim import launch
from tests.metalshim.arguments import Outputs, descriptions
from tests.metalshim.arrays import (
    Scalar,
    numpy_of,
    span,
    template_value,
)
from tests.metalshim.launch import Buffer, Launched
from tests.metalshim.translate import Argument, named

_BEFORE_BUFFER = (
    8  # MLX on a CPU keeps a buffer's size there; a GPU's buffers begin at multiples of 256
)

MOST_SHARED_BYTES = 227 * 1024  # of a block, on Hopper


@dataclass(eq=False)
class Settings:
    """How kernels run, *read*: how their files are; and what ran: each launch by kernel, and each kernel's text."""

    mode: str = "ub"
    order: str = "forward"
    seed: int = 0
    read: Callable[[Path], str] = Path.read_text
    launches: list[tuple[str, Launched]] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)


_installed: list[Settings] = []  # the last one counts


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> Callable[..., list[mx.array]]:
    """Return a function that runs the kernel; arguments and result are those of mx.fast.cuda_kernel."""
    in_place = written_inputs(source)

    def call(
        *,
        inputs: Sequence[mx.array | Scalar],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, object]] = (),
        init_value: float | None = None,
        stream: object = None,
    ) -> list[mx.array]:
        settings = _installed[-1]
        arguments, buffers, written = [], [], []
        for key, value in zip(input_names, inputs, strict=True):
            array, dtype = numpy_of(value)
            if ensure_row_contiguous:
                array = np.ascontiguousarray(array) if array.ndim else array
            given = named(key, source)
            arguments.append(Argument(key, dtype, array.size, array.ndim, given=given))
            address = array.ctypes.data
            alignment = (address - _BEFORE_BUFFER) % 16
            buffers.append(Buffer(key, span(array), key in in_place, alignment=alignment))
            if key in in_place:
                written.append((address, buffers[-1]))
            buffers += descriptions(key, array, given)
        outputs = Outputs(output_names, output_shapes, output_dtypes, init_value)
        arguments += outputs.arguments
        values = [(key, template_value(value)) for key, value in template]
        text = translation(name, header, source, arguments, values, shared_memory, settings.read)
        settings.sources.add(text)
        blocks = [math.ceil(n / size) for n, size in zip(grid, threadgroup, strict=True)]
        done = launch.launch(
            compiler.compiled(text, settings.mode),
            [*buffers, *outputs.buffers],
            [n * size for n, size in zip(blocks, threadgroup, strict=True)],
            threadgroup,
            check=settings.mode == "check",
            order=settings.order,
            seed=settings.seed,
            most_group_memory=MOST_SHARED_BYTES,
        )
        settings.launches.append((name, done))
        for address, buffer in written:
            ctypes.memmove(address, buffer.memory, len(buffer.memory))
        return outputs.arrays()

    return call


@contextmanager
def installed(
    mode: str = "ub",
    order: str = "forward",
    seed: int = 0,
    read: Callable[[Path], str] = Path.read_text,
) -> Iterator[Settings]:
    """Make code that is written for CUDA run here: mx.fast.cuda_kernel is ours, and a Hopper GPU is the default device."""
    settings = Settings(mode, order, seed, read)
    cpu_stream = mx.default_stream
    _installed.append(settings)
    with (
        patch.object(mx.fast, "cuda_kernel", cuda_kernel),
        patch.object(mx.cuda, "is_available", lambda: True),
        patch.object(mx, "default_device", lambda: mx.Device(mx.gpu)),
        patch.object(mx, "default_stream", lambda _: cpu_stream(mx.cpu)),
        patch.object(mx, "device_info", lambda *_: {"compute_capability_major": 9}),
    ):
        native_layout.cache_clear()  # it goes by the device
        try:
            yield settings
        finally:
            native_layout.cache_clear()
            _installed.remove(settings)
