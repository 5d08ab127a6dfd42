"""MLX's arrays as NumPy's, bit for bit, and back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from tests.metalshim.translate import TemplateValue

Scalar = bool | int | float


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name of *dtype* in MLX."""
    return str(dtype).rsplit(".", 1)[-1].removesuffix("_")


def storage(dtype: str) -> np.dtype[Any]:
    """Return NumPy's type for the bits of MLX's *dtype*: it has no bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def numpy_of(value: mx.array | Scalar) -> tuple[np.ndarray[Any, Any], str]:
    """Return *value* as an array that shares MLX's memory, strides included, and the name of its dtype."""
    if isinstance(value, bool | int | float):
        array = np.array(value, {bool: np.bool_, int: np.int32, float: np.float32}[type(value)])
        return array, str(array.dtype)
    dtype = dtype_name(value.dtype)
    return np.asarray(value.view(mx.uint16) if dtype == "bfloat16" else value), dtype


def span(array: np.ndarray[Any, Any]) -> bytes:
    """Return the memory from the first to the last element of *array*, gaps between them included."""
    if not array.size:
        return b""
    reach = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (reach // array.itemsize + 1,), (array.itemsize,))
    return flat.tobytes()


def mlx_of(array: np.ndarray[Any, Any], dtype: mx.Dtype) -> mx.array:
    """Return *array*, which holds the bits of MLX's *dtype*."""
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


def template_value(value: object) -> TemplateValue:
    """Return a template argument: a number, or the name of a dtype."""
    return value if isinstance(value, bool | int) else dtype_name(value)  # type: ignore[arg-type] # a dtype then
