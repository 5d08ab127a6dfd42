"""Legal programs pass the checker in every order of threads, with one result."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.metalshim import shim
from tests.metalshim.compiler import ShimError
from tests.metalshim.conftest import Run
from tests.metalshim.launch import ORDERS
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
X = np.arange(256, dtype=np.float32)
LEGAL = {
    "simdgroup_barrier within a simdgroup": (
        "threadgroup float s[64];\ns[i] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = s[i ^ 1];",
        X[np.arange(64) ^ 1],
    ),
    "whole simdgroups return early": (
        "if (i >= 32) return;\nout[i] = simd_sum(x[i]);\nout[i + 32] = 0;",
        np.repeat([496.0, 0.0], 32),
    ),
    "a reduction over part of a simdgroup": (
        "if (i >= 40) { out[i] = 0; return; }\nout[i] = simd_sum(x[i]);",
        np.repeat([496.0, 284.0, 0.0], [32, 8, 24]),
    ),
    "a pointer to threadgroup memory": (
        "threadgroup float s[64];\nthreadgroup float* p = s;\np[i] = x[i];\n" + BARRIER + "out[i] = p[63 - i];",
        X[63::-1],
    ),
    "prefix sums": (
        "out[i] = simd_prefix_inclusive_sum(1.0f) + simd_prefix_exclusive_sum(1.0f);",
        np.tile(2.0 * np.arange(32) + 1, 2),
    ),
    "votes": ("out[i] = float(simd_any(lane == 3)) + 2 * float(simd_all(lane < 31));", np.ones(64)),
    "literals are floats": ("out[i] = 1.0 / 3.0 + 0.1;", np.full(64, np.float32(1) / np.float32(3) + np.float32(0.1))),
}  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), LEGAL.values(), ids=list(LEGAL))
def test_a_legal_program_gives_its_result_in_every_order(
    run: Run, body: str, expected: np.ndarray
) -> None:
    for order in ORDERS:
        np.testing.assert_array_equal(np.array(run(body, order=order)), expected.astype(np.float32))


def test_the_last_threadgroup_may_be_smaller(run: Run) -> None:
    out = run(
        "out[g] = float(threads_per_threadgroup.x) + 1000 * float(dispatch_threads_per_threadgroup.x);",
        group=48,
    )
    assert out[0].item() == 48048
    assert out[63].item() == 48016


def test_small_inputs_are_constants_and_larger_ones_are_not(run: Run) -> None:
    """MLX puts inputs of fewer than 8 elements into another address space; a body must compile with both."""
    with shim.installed() as settings:
        kernel = mx.fast.metal_kernel(
            name="f", input_names=["x"], output_names=["out"], source="out[0] = x[x_shape[0] - 1];"
        )
        for n in (7, 8):
            (out,) = kernel(
                inputs=[mx.arange(n)],
                output_shapes=[(1,)],
                output_dtypes=[mx.int32],
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
            )
            assert out.item() == n - 1
        spaces = ["const constant int32_t* x" in text for text in settings.sources]
    assert spaces == [True, False]


def test_strides_reach_the_kernel_when_rows_need_not_be_contiguous() -> None:
    x = mx.arange(12).reshape(3, 4).T
    source = "uint i = thread_position_in_grid.x; out[i] = x[i * x_strides[0] + 2 * x_strides[1]];"
    with shim.installed():
        kernel = mx.fast.metal_kernel(
            name="f",
            input_names=["x"],
            output_names=["out"],
            source=source,
            ensure_row_contiguous=False,
        )
        (out,) = kernel(
            inputs=[x],
            output_shapes=[(4,)],
            output_dtypes=[mx.int32],
            grid=(4, 1, 1),
            threadgroup=(4, 1, 1),
        )
    assert out.tolist() == x[:, 2].tolist()


def test_bfloat16_goes_in_and_out_unchanged() -> None:
    x = mx.array([1.5, -2.25, 3e38, float("inf")], mx.bfloat16)
    with shim.installed():
        kernel = mx.fast.metal_kernel(
            name="f",
            input_names=["x"],
            output_names=["out"],
            source="uint i = thread_position_in_grid.x; T v = x[i]; out[i] = v;",
        )
        (out,) = kernel(
            inputs=[x],
            template=[("T", mx.bfloat16)],
            output_shapes=[(4,)],
            output_dtypes=[mx.bfloat16],
            grid=(4, 1, 1),
            threadgroup=(4, 1, 1),
        )
    assert out.dtype == mx.bfloat16
    assert out.tolist() == x.tolist()


def test_a_threadgroup_of_more_than_1024_threads_is_refused(run: Run) -> None:
    with pytest.raises(ShimError, match="larger than 1024 threads"):
        run("out[0] = 0;", threads=2048, group=1025)


def test_metal_is_available_only_while_the_shim_is_installed() -> None:
    before = mx.metal.is_available()
    with shim.installed():
        assert mx.metal.is_available()
    assert mx.metal.is_available() is before


def test_a_rough_run_is_off_in_the_last_bits_only_where_apples_functions_may_be(run: Run) -> None:
    body = "float y = x[i] / 64; out[i] = {};"
    for function in ("fast::exp2(y)", "simd_sum(fast::exp(-y))"):
        exact, rough = (np.array(run(body.format(function), mode)) for mode in ("ub", "rough"))
        off = np.abs(rough / exact - 1)
        assert 0 < off.max() < 1e-6, function
    for function in ("precise::exp2(y)", "exp(y)", "simd_max(y)"):
        exact, rough = (np.array(run(body.format(function), mode)) for mode in ("ub", "rough"))
        np.testing.assert_array_equal(rough, exact)


def test_a_rough_run_flushes_denormal_numbers_and_leaves_the_process_as_it_was(run: Run) -> None:
    tiny = "out[i] = 1e-38f * (x[i] / 256) * float(i == 1);"
    assert run(tiny, "ub")[1].item() > 0
    assert run(tiny, "rough")[1].item() == 0
    assert np.float32(1e-38) * np.float32(0.25) > 0
