"""mx.fast.metal_kernel for a machine without Metal: the same call, executed on the CPU.

Kernels run when they are called, not when their result is needed; not inside mx.compile, and only while installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from tests.metalshim import compiler, launch
from tests.metalshim.arguments import Outputs, descriptions
from tests.metalshim.arrays import (
    Scalar,
    numpy_of,
    span,
    template_value,
)
from tests.metalshim.launch import Buffer, Launched
from tests.metalshim.translate import Argument, named, translation


@dataclass(eq=False)
class Settings:
    """How kernels run, and what ran: each launch by kernel, each translated source by its text."""

    mode: str = "ub"
    order: str = "forward"
    seed: int = 0
    launches: list[tuple[str, Launched]] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)


_installed: list[Settings] = []  # the last one counts


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: object = None,
) -> Callable[..., list[mx.array]]:
    """Return a function that runs the kernel; arguments and result are those of mx.fast.metal_kernel."""
    if atomic_outputs:
        raise NotImplementedError("no kernel of ours has atomic outputs")

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
        arguments, buffers = [], []
        for key, value in zip(input_names, inputs, strict=True):
            array, dtype = numpy_of(value)
            if ensure_row_contiguous:
                array = np.ascontiguousarray(array) if array.ndim else array
            given = named(key, source) if array.ndim else ()
            arguments.append(Argument(key, dtype, array.size, array.ndim, given=given))
            buffers.append(Buffer(key, span(array)))
            buffers += descriptions(key, array, given)
        outputs = Outputs(output_names, output_shapes, output_dtypes, init_value)
        arguments += outputs.arguments
        values = [(key, template_value(value)) for key, value in template]
        text = translation(name, header, source, arguments, values)
        settings.sources[text] = name
        done = launch.launch(
            compiler.compiled(text, settings.mode),
            [*buffers, *outputs.buffers],
            grid,
            threadgroup,
            check=settings.mode == "check",
            flush=settings.mode == "rough",
            order=settings.order,
            seed=settings.seed,
        )
        settings.launches.append((name, done))
        return outputs.arrays()

    return call


@contextmanager
def installed(mode: str = "ub", order: str = "forward", seed: int = 0) -> Iterator[Settings]:
    """Make code that is written for Metal run here: mx.fast.metal_kernel is ours, and Metal is the default device."""
    settings = Settings(mode, order, seed)
    _installed.append(settings)
    with (
        patch.object(mx.fast, "metal_kernel", metal_kernel),
        patch.object(mx.metal, "is_available", lambda: True),
        patch.object(mx, "default_device", lambda: mx.Device(mx.gpu)),
    ):
        try:
            yield settings
        finally:
            _installed.remove(settings)
