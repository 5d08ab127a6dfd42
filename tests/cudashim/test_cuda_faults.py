"""Every seeded fault must be reported: what cudashim does not see, no kernel test can claim."""

from __future__ import annotations

import pytest

from tests.cudashim.conftest import Run
from tests.metalshim.compiler import ShimError
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

DYNAMIC = "extern __shared__ __align__(128) unsigned char shared[];\n"
SHARED = "__shared__ float s[64];\ns[i] = x[i];\n"
# a barrier, one bulk copy of 128 bytes to shared memory behind it, and who waits
COPY = (
    DYNAMIC
    + "const u32 barrier = shared_address(shared), to = barrier + 128;\n"
    + "if (i == 0) { barrier_init(barrier); barriers_visible(); }\n__syncthreads();\n"
    + "const float* there = (const float*)(shared + 128);\n"
)
COPIED = COPY + "if (i == 0) copy_to_shared(to, x, 128, barrier, read_once());\n"

RACES = {
    "no barrier between write and read": SHARED + "out[i] = s[63 - i];",
    "no second barrier before the next write": SHARED
    + "__syncthreads();\nfloat a = s[63 - i];\ns[i] = a * 2;\n__syncthreads();\nout[i] = s[i];",
    "a shuffle taken for a barrier": SHARED
    + "float z = __shfl_sync(ALL, 0.f, 0);\nout[i] = s[i ^ 1] + z;",
    "a warp's barrier across warps": SHARED + "__syncwarp();\nout[i] = s[63 - i];",
    "an output read back without a barrier": "out[i] = x[i];\nout[i] += out[63 - i];",
    "a copy over what others still read": COPIED
    + "barrier_wait(barrier, 0);\nfloat a = there[lane];\n"
    + "if (i == 0) copy_to_shared(to, x, 128, barrier, read_once());\nbarrier_wait(barrier, 1);\n"
    + "out[i] = a;",
}
OUTSIDE = {
    "one past the end": "out[i] = x[i * 4 + 4];",
    "write past the end": "out[i + 1] = x[i];",
    "before the start": "out[i] = x[i - 1];",
    "past a shared array, into its neighbour": "__shared__ float a[64];\n__shared__ float b[64];\na[i] = b[i] = x[i];\n"
    "__syncthreads();\nfloat* both[2] = {a, b};\nfloat* p = both[(int)x[0]];\nout[i] = p[i + 1] + b[i];",
    "a shared address past the end": COPY
    + "if (i == 0) copy_to_shared(to + 4096, x, 128, barrier, read_once());\nout[i] = 0;",
}
UNINITIALIZED = {
    "shared memory": "__shared__ float s[65];\ns[i] = x[i];\n__syncthreads();\nout[i] = s[i + 1];",
    "an output that is read": "out[i] += x[i];",
}
DIVERGENCES = {
    "a barrier in each branch": "if (i < 32) {\n__syncthreads();\n} else {\n__syncthreads();\n}\nout[i] = 0;",
    "a barrier after some returned": "if (i >= 40) return;\n__syncthreads();\nout[i] = 0;",
    "half a warp shuffles": "float r = 0;\nif (lane < 16)\nr = __shfl_sync(ALL, x[i], 0);\nout[i] = r;",
    "a shuffle of the lanes that are left": "if (lane > 8) return;\nout[i] = __shfl_sync(ALL, x[i], 0);",
    "two functions of a warp at once": "float r;\nif (lane < 7)\nr = warp_sum(x[i]);\nelse\nr = warp_max(x[i]);\nout[i] = r;",
    "a named barrier that too few come to": 'if (i < 32) asm volatile("bar.sync 1, %0;" ::"n"(64) : "memory");\nout[i] = 0;',
    "a named barrier of two sizes": 'asm volatile("bar.sync 1, %0;" ::"r"(i < 32 ? 64 : 32) : "memory");\nout[i] = 0;',
    "an election in half a warp": "bool a = false;\nif (lane < 16)\na = is_leader();\nout[i] = a;",
}
UNDEFINED = {
    "shared array index": "__shared__ float s[64];\ns[i + 1] = x[i];\n__syncthreads();\nout[i] = s[i];",
    "local array index": "float s[4];\nfor (int k = 0; k <= (int)x[4]; k++) s[k] = x[k];\nout[i] = s[0];",
    "shift by the width": "out[i] = (float)(1u << (i & 32));",
    "misaligned vector": "float4 v = *(const float4*)(x + i); out[i] = v.y;",
    "a copy of 100 bytes": COPY
    + "if (i == 0) copy_to_shared(to, x, 100, barrier, read_once());\nout[i] = 0;",
    "a copy from an odd place": COPY
    + "if (i == 0) copy_to_shared(to, x + 1, 128, barrier, read_once());\nout[i] = 0;",
    "a block that ends before its copy": COPIED + "out[i] = 0;",
    "an mbarrier that nobody made": DYNAMIC
    + "barrier_wait(shared_address(shared), 0);\nout[i] = 0;",
    "a second arrival in one phase": COPIED
    + "if (i == 0) copy_to_shared(to, x, 128, barrier, read_once());\nout[i] = 0;",
}
NOT_COMPILED = {
    "an instruction that nobody knows": 'u32 r; asm("popc.b32 %0,%1;" : "=r"(r) : "r"(1u)); out[i] = r;',
    "a write to an input": "x[i] = 1; out[i] = 0;",
    "a function of no CUDA header": "out[i] = simd_sum(x[i]);",
}


@pytest.mark.parametrize("body", RACES.values(), ids=list(RACES))
def test_a_race_is_reported(run: Run, body: str) -> None:
    # a lane that comes too early may also find nothing written yet
    with pytest.raises(ShimError, match=r"RACE|UNINITIALIZED"):
        run(body)


def test_two_blocks_that_write_one_place_are_a_race(run: Run) -> None:
    with pytest.raises(ShimError, match="RACE"):
        run("out[i] = x[g];", threads=128)


@pytest.mark.parametrize("ordered", [True, False])
def test_blocks_that_meet_at_a_counter_are_no_race_unless_they_skip_it(
    run: Run, ordered: bool
) -> None:
    count = "count_up((u32*)out)" if ordered else "((u32*)out)[0]++"
    body = f"if (i == 0 && blockIdx.x == 0) out[1] = 5.f, out[0] = 0.f;\nif (i == 0) {count};\n"
    body += "if (i == 0 && blockIdx.x == 1) out[2] = out[1];\nif (g >= 3 && g < 64) out[g] = 0;"
    if ordered:
        assert run(body, threads=128)[2].item() == 5
    else:
        with pytest.raises(ShimError, match="RACE"):
            run(body, threads=128)


@pytest.mark.parametrize("body", OUTSIDE.values(), ids=list(OUTSIDE))
def test_an_access_outside_a_buffer_is_reported(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match="OUT OF BOUNDS"):
        run(body)


@pytest.mark.parametrize("order", ["forward", "random"])
def test_guard_pages_catch_a_copy_that_reads_too_far(run: Run, order: str) -> None:
    body = COPY + "if (i == 0) copy_to_shared(to, x + 240, 128, barrier, read_once());\n"
    with pytest.raises(ShimError, match="guard page"):
        run(body + "barrier_wait(barrier, 0);\nout[i] = there[lane];", "ub", order=order)


@pytest.mark.parametrize("body", UNINITIALIZED.values(), ids=list(UNINITIALIZED))
def test_what_nobody_wrote_is_reported_when_it_is_read(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match="UNINITIALIZED"):
        run(body)


def test_what_a_copy_brings_is_poison_before_somebody_waits_for_it(run: Run) -> None:
    early = run(COPIED + "float a = there[lane];\nbarrier_wait(barrier, 0);\nout[i] = a;", "ub")
    late = run(COPIED + "barrier_wait(barrier, 0);\nout[i] = there[lane];", "ub")
    assert not (early == early).any().item()  # NaN
    assert late[:32].tolist() == list(range(32))


@pytest.mark.parametrize("mode", ["ub", "check"])
@pytest.mark.parametrize("body", DIVERGENCES.values(), ids=list(DIVERGENCES))
def test_a_divergence_is_an_error_and_no_hang(run: Run, body: str, mode: str) -> None:
    with pytest.raises(ShimError, match="DIVERGENCE"):
        run(body, mode)


@pytest.mark.parametrize("body", UNDEFINED.values(), ids=list(UNDEFINED))
def test_undefined_behaviour_is_reported(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match=r"UB|OUT OF BOUNDS"):
        run(body, "ub")


@pytest.mark.parametrize("body", NOT_COMPILED.values(), ids=list(NOT_COMPILED))
def test_what_no_cuda_compiler_takes_does_not_compile(run: Run, body: str) -> None:
    with pytest.raises(ShimError, match="compile failed"):
        run(body, "ub")


def test_waiting_for_what_nobody_sends_is_an_error(run: Run) -> None:
    with pytest.raises(ShimError, match="HANG"):
        run(COPY + "barrier_wait(barrier, 0);\nout[i] = 0;", "ub", threads=32, block=32)
