"""The canary: kernels of MLX, which nobody here wrote, give on the shim what MLX gives, and the checker has no complaint."""

from __future__ import annotations

import re
from collections.abc import Mapping

import mlx.core as mx
import pytest

from tests.metalshim import compiler, shim
from tests.metalshim.launch import ORDERS
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}

SOFTMAX = """
softmax_single_row<T, float>(
    x, out, size, threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
    thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
"""

ATTENTION = """
const int tokens = k_shape[1];
const int group = q_shape[0] / k_shape[0];
const size_t row = DIM;
const size_t head = tokens * row;
const int none = 0;
sdpa_vector<T, DIM>(
    q, k, v, out, group, tokens, head, row, head, row, scale, (const device bool*)q, q, none, none, none,
    logits, q_shape[0], threadgroup_position_in_grid, threadgroups_per_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


def header(name: str, constants: Mapping[str, bool | int]) -> str:
    """Return a header of MLX with its function constants as *constants* has them: they are given when a pipeline is made."""
    text = (compiler.mlx() / "mlx/backend/metal/kernels" / name).read_text()
    text = text.replace("#include <metal_simdgroup>", "")  # one header has everything here
    return re.sub(
        r"constant (bool|int) (\w+) \[\[function_constant\(\d+\)\]\];",
        lambda found: f"constant {found[1]} {found[2]} = {int(constants.get(found[2], 0))};",
        text,
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 33, 300])
def test_softmax_of_a_row(size: int, dtype: mx.Dtype, order: str) -> None:
    x = mx.random.normal((3, size), key=mx.random.key(size)).astype(dtype)
    with shim.installed("check", order) as settings:
        kernel = mx.fast.metal_kernel(
            name="softmax", input_names=["x", "size"], output_names=["out"], source=SOFTMAX,
            header="#define SOFTMAX_N_READS 4\n" + header("softmax.h", {}),
        )  # fmt: skip
        (out,) = kernel(
            inputs=[x, size],
            template=[("T", dtype)],
            grid=(3 * 96, 1, 1),
            threadgroup=(96, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[dtype],
        )

    assert settings.launches[-1][1].unwritten == {"out": 0}
    expected = mx.softmax(x.astype(mx.float32), axis=-1)
    assert mx.max(mx.abs(out.astype(mx.float32) - expected)).item() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "causal", "sinks"), [(1, False, False), (70, True, False), (70, False, True)])  # fmt: skip
def test_attention_of_one_query(tokens: int, causal: bool, sinks: bool, dtype: mx.Dtype) -> None:
    q, k, v, logits = (
        mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
        for seed, shape in enumerate([(4, 1, 64), (2, tokens, 64), (2, tokens, 64), (4,)])
    )
    with shim.installed("check") as settings:
        kernel = mx.fast.metal_kernel(
            name="attention", input_names=["q", "k", "v", "logits", "scale"], output_names=["out"],
            source=ATTENTION,
            header=header("sdpa_vector.h", {"do_causal": causal, "has_sinks": sinks, "blocks": 1}),
        )  # fmt: skip
        (out,) = kernel(
            inputs=[q, k, v, mx.tile(logits, 2), 0.125],
            template=[("T", dtype), ("DIM", 64)],
            grid=(4 * 1024, 1, 1),
            threadgroup=(1024, 1, 1),
            output_shapes=[q.shape],
            output_dtypes=[dtype],
        )

    assert settings.launches[-1][1].unwritten == {"out": 0}
    wide = [part.astype(mx.float32)[None] for part in (q, k, v)]
    learned = logits.astype(mx.float32) if sinks else None
    expected = mx.fast.scaled_dot_product_attention(*wide, scale=0.125, sinks=learned)[0]
    assert mx.max(mx.abs(out.astype(mx.float32) - expected)).item() < TOLERANCE[dtype]
