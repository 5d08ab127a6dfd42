"""What a call of a custom kernel hands over besides its inputs' numbers, and what it gets back: alike for Metal and CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tests.metalshim.arrays import dtype_name, mlx_of, storage
from tests.metalshim.launch import Buffer
from tests.metalshim.translate import Argument


def descriptions(name: str, array: npt.NDArray[np.generic], given: Sequence[str]) -> list[Buffer]:
    """Return those of shape, strides (in elements) and ndim of the input *name* that are *given*."""
    strides = [stride // array.itemsize for stride in array.strides]
    described = {
        "shape": np.array(array.shape, np.int32),
        "strides": np.array(strides, np.int64),
        "ndim": np.array(array.ndim, np.int32),
    }
    return [Buffer(f"{name}_{what}", described[what].tobytes()) for what in given]


class Outputs:
    """The outputs of one call, as arguments and as buffers."""

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None,
    ) -> None:
        self.arguments: list[Argument] = []
        self.buffers: list[Buffer] = []
        self._shapes, self._dtypes = shapes, dtypes
        for name, shape, kind in zip(names, shapes, dtypes, strict=True):
            dtype = dtype_name(kind)
            filled = np.full(shape, init_value or 0, storage(dtype))
            self.arguments.append(Argument(name, dtype, filled.size, filled.ndim, output=True))
            initialized = init_value is not None
            self.buffers.append(
                Buffer(name, filled.tobytes(), writable=True, initialized=initialized)
            )

    def arrays(self) -> list[mx.array]:
        """Return what is in the buffers."""
        return [
            mlx_of(np.frombuffer(buffer.memory, storage(dtype_name(kind))).reshape(shape), kind)
            for buffer, shape, kind in zip(self.buffers, self._shapes, self._dtypes, strict=True)
        ]
