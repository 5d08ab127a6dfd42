"""Every seeded fault must be reported: what the shim does not see, no kernel test can claim."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.metalshim import compiler, shim
from tests.metalshim.compiler import ShimError
from tests.metalshim.conftest import NAMES, Run
from tests.metalshim.needed import needs_shim
from tests.metalshim.translate import Argument, translation

pytestmark = needs_shim

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SHARED = "threadgroup float s[64];\ns[i] = x[i];\n"

RACES = {
    "no barrier between write and read": SHARED + "out[i] = s[63 - i];",
    "no second barrier before the next write": SHARED
    + BARRIER
    + "float a = s[63 - i];\ns[i] = a * 2;\n"
    + BARRIER
    + "out[i] = s[i];",
    "barrier of no memory": SHARED
    + "threadgroup_barrier(mem_flags::mem_none);\nout[i] = s[63 - i];",
    "simd function taken for a barrier": SHARED
    + "float z = simd_sum(0.0f);\nout[i] = s[i ^ 1] + z;",
    "simdgroup barrier across simdgroups": SHARED
    + "simdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = s[63 - i];",
    "device memory behind a threadgroup barrier": "out[i] = x[i];\n"
    + BARRIER
    + "float a = out[63 - i];\n"
    + BARRIER
    + "out[i] = a;",
}

# two arrays, both written, and a pointer of which the compiler does not know where it ends
NEIGHBOURS = (
    "threadgroup float a[64];\nthreadgroup float b[64];\na[i] = b[i] = x[i];\n"
    "threadgroup float* both[2] = {a, b};\nthreadgroup float* p = both[int(x[0])];\n" + BARRIER
)

OUTSIDE = {
    "one past the end": "out[i] = x[i * 4 + 4];",
    "write past the end": "out[i + 1] = x[i];",
    "before the start": "out[i] = x[int(i) - 1];",
    "read past a threadgroup array, into the next": NEIGHBOURS + "out[i] = p[i + 1] + b[i];",
    "write past a threadgroup array, into the next": NEIGHBOURS + "p[i + 1] = 1;\nout[i] = b[i];",
}

UNINITIALIZED = {
    "threadgroup memory": "threadgroup float s[65];\ns[i] = x[i];\n"
    + BARRIER
    + "out[i] = s[i + 1];",
    "an output that is read": "out[i] += x[i];",
}

DIVERGENCES = {
    "a barrier in each branch": "if (i < 32) {\n"
    + BARRIER
    + "} else {\n"
    + BARRIER
    + "}\nout[i] = 0;",
    "a barrier after some returned": "if (i >= 40) return;\n" + BARRIER + "out[i] = 0;",
    "two simd functions at once": "float r;\nif (lane < 7)\nr = simd_sum(x[i]);\nelse\nr = simd_max(x[i]);\nout[i] = r;",
    "a lane's own number of rounds": "float r = 0;\nfor (uint k = 0; k < 1 + (lane & 1); k++)\nr += simd_sum(x[i]);\n"
    + BARRIER
    + "out[i] = r;",
    "a simd function against a barrier": "float r = 0;\nif (lane == 0)\nr = simd_sum(x[i]);\n"
    + BARRIER
    + "out[i] = r;",
}

UNDEFINED = {
    "threadgroup array index": "threadgroup float s[64];\ns[i + 1] = x[i];\n"
    + BARRIER
    + "out[i] = s[i];",
    "local array index": "float s[4];\nfor (int k = 0; k <= int(x[4]); k++) s[k] = x[k];\nout[i] = s[0];",
    "shift by the width": "out[i] = float(1u << (i & 32u));",
    "division by zero": "out[i] = float(64 / int(i));",
    "float out of an integer's range": "uchar c = uchar(x[i] * 10.0f - 5.0f); out[i] = c;",
    "misaligned vector": "float4 v = *(const device float4*)(x + i); out[i] = v.y;",
}

REFUSED_BY_APPLE = {
    "write to an input": ("x[i] = 1; out[i] = 0;", mx.float32),
    "double": ("double d = x[i]; out[i] = d;", mx.float32),
    "min of int and uint": ("out[i] = min(int(i), 3u);", mx.float32),
    "float to bfloat unwritten": ("out[i] = x[i] * 2.0f;", mx.bfloat16),
}


@pytest.mark.parametrize("body", RACES.values(), ids=list(RACES))
def test_a_race_is_reported(run: Run, body: str) -> None:
    # a lane that comes too early may also find nothing written yet
    with pytest.raises(ShimError, match=r"RACE|UNINITIALIZED"):
        run(body)


def test_two_threadgroups_that_write_one_place_are_a_race(run: Run) -> None:
    with pytest.raises(ShimError, match="RACE"):
        run("out[i] = x[g];", threads=128)


@pytest.mark.parametrize("body", OUTSIDE.values(), ids=list(OUTSIDE))
def test_an_access_outside_a_buffer_is_reported(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match="OUT OF BOUNDS"):
        run(body)


@pytest.mark.parametrize(
    "body", ["out[i] = x[i * 4 + 4];", "out[i] = *(x + 100000000u * (i + 1));"]
)
def test_guard_pages_catch_accesses_that_nobody_checks(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match="guard page"):
        run(body, "ub")


@pytest.mark.parametrize("mode", ["ub", "check"])
def test_an_overrun_that_the_compiler_sees_is_an_error_and_no_crash(run: Run, mode: str) -> None:
    body = "threadgroup float a[64];\nthreadgroup float* p = a;\np[i + 1] = x[i];\nout[i] = 0;"
    with pytest.raises(ShimError, match=r"SIGILL|OUT OF BOUNDS"):
        run(body, mode)


@pytest.mark.parametrize("body", UNINITIALIZED.values(), ids=list(UNINITIALIZED))
def test_a_read_of_what_nobody_wrote_is_reported(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match="UNINITIALIZED"):
        run(body)


@pytest.mark.parametrize("body", DIVERGENCES.values(), ids=list(DIVERGENCES))
def test_lanes_that_part_are_reported(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match="DIVERGENCE"):
        run(body)


def test_a_shuffle_from_a_lane_that_returned_is_reported(run: Run) -> None:
    with pytest.raises(ShimError, match="inactive lane 20"):
        run("if (lane >= 16) return;\nout[i] = simd_shuffle(x[i], ushort(20));")


@pytest.mark.parametrize("body", UNDEFINED.values(), ids=list(UNDEFINED))
def test_undefined_behaviour_is_reported(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match="UB:"):
        run(body, "ub")


def test_bits_beyond_a_word_are_reported(run: Run) -> None:
    with pytest.raises(ShimError, match="extract_bits"):
        run("out[i] = extract_bits(uint(i), 30, 4);", "ub")


@pytest.mark.parametrize(("body", "dtype"), REFUSED_BY_APPLE.values(), ids=list(REFUSED_BY_APPLE))
def test_what_apple_does_not_compile_does_not_compile(run: Run, body: str, dtype: mx.Dtype) -> None:
    with pytest.raises(ShimError, match="compile failed"):
        run(body, "ub", dtype=dtype)


def test_too_much_threadgroup_memory_is_refused(run: Run) -> None:
    with pytest.raises(ShimError, match="32772 bytes > 32768"):
        run("threadgroup float s[8193];\ns[i] = 1; out[i] = s[i];", "ub")


def test_an_output_that_was_not_written_is_counted_and_poisoned() -> None:
    with shim.installed("check") as settings:
        kernel = mx.fast.metal_kernel(
            name="f",
            input_names=[],
            output_names=["out"],
            source="uint i = thread_position_in_grid.x; if (i != 5) out[i] = 1;",
        )
        out = kernel(
            inputs=[],
            output_shapes=[(8,)],
            output_dtypes=[mx.float32],
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
        )[0]
        assert settings.launches[-1][1].unwritten == {"out": 4}
    assert mx.isnan(out).tolist() == [False] * 5 + [True] + [False] * 2


def test_an_uninitialized_local_is_no_plausible_number(run: Run) -> None:
    out = run("float a[2];\nif (i != 3) a[0] = 1;\nout[i] = a[0];")
    assert not abs(out[3].item() - 1) < 1


LINTED = {
    "threadgroup = device": "threadgroup float* p = x;\nout[i] = p[0];",
    "thread = device": "float* p = out;\np[i] = 0;",
    "helper in another space": "threadgroup float s[4];\nout[i] = first(s);",
    "newer C++ than Metal's": "if constexpr (true) out[i] = 0;",
    "cast without a space": "out[i] = *((const float*)x + i);",
}


@pytest.mark.parametrize("body", LINTED.values(), ids=list(LINTED))
def test_the_lint_finds_what_the_emulation_lets_pass(body: str) -> None:
    assert compiler.lint(_translated(body))


def test_the_lint_accepts_pointers_that_name_their_space() -> None:
    body = (
        "threadgroup float s[64];\nthreadgroup float* p = s;\np[i] = first(x);\n"
        + BARRIER
        + "out[i] = s[i];"
    )
    assert compiler.lint(_translated(body)) == ()


def _translated(body: str) -> str:
    header = "float first(const device float* p) { return p[0]; }\n"
    arguments = [
        Argument("x", "float32", size=256, ndim=1),
        Argument("out", "float32", size=64, ndim=1, output=True),
    ]
    return translation("f", header, NAMES + body, arguments, [])
