"""Inline PTX: how it is read, and that each instruction does what the PTX manual says."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.cudashim import ptx
from tests.cudashim.conftest import Run
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim


def test_operands_go_where_the_text_of_the_instruction_names_them() -> None:
    source = 'asm("fma.rn %0, %2, %1;" : "=r"(r[i]) : "r"(f(a, b)), "r"(c));\nnext;'
    assert ptx.translated(source) == "{ ptx::fma_rn((r[i]), (c), (f(a, b))); };\nnext;"


def test_lines_stay_where_they_are_and_the_memory_clobber_is_no_operand() -> None:
    source = 'a;\nasm volatile(\n  "bar.sync 2,"\n  " %0;"\n  ::"n"(N)\n  : "memory");\nb;'
    translated = ptx.translated(source)
    assert translated.splitlines()[-1] == "b;"
    assert translated.count("\n") == source.count("\n")
    assert "{ ptx::bar_sync(2, (N)); }" in translated


def test_predicates_and_several_statements_share_a_scope() -> None:
    source = 'asm("{ .reg .pred p; elect.sync _|p,0xffffffff; selp.u32 %0,1,0,p; }" : "=r"(x));'
    assert ptx.translated(source) == (
        "{ bool p = false; ptx::elect_sync(ptx::nowhere, p, 0xffffffff); ptx::selp_u32((x), 1, 0, p); };"
    )


@pytest.mark.parametrize("source", ['asm("mov %0,1;" : "=r"(x)', 'asm("mov %0,1;" : x);'])
def test_what_is_no_asm_is_refused(source: str) -> None:
    with pytest.raises(ptx.PtxError):
        ptx.translated(source)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_a_matrix_product_has_its_numbers_where_hopper_has_them(
    run: Run, signed: bool, order: str
) -> None:
    """PTX ISA, "Matrix fragments for mma.m16n8k32": checked against a plain product."""
    rng = np.random.default_rng(1)
    a = rng.integers(-128, 128, (16, 32)).astype(np.int8)
    b = rng.integers(*((-128, 128) if signed else (0, 256)), (32, 8)).astype(
        np.int8 if signed else np.uint8
    )
    words = np.zeros((32, 8), np.uint32)  # of each lane: four of A, two of B
    for lane in range(32):
        g, c = divmod(lane, 4)
        for at, (row, column) in enumerate([(g, 0), (g + 8, 0), (g, 16), (g + 8, 16)]):
            words[lane, at] = a[row, column + 4 * c :][:4].view(np.uint32)[0]
        for at, row in enumerate([0, 16]):
            words[lane, 4 + at] = np.ascontiguousarray(b[row + 4 * c :, g][:4]).view(np.uint32)[0]
    body = f"""
        const u32* w = (const u32*)x + 8 * lane;
        int c[4] = {{1, 2, 3, 4}};
        mma_{"signed" if signed else "unsigned"}(c, w[0], w[1], w[2], w[3], w[4], w[5]);
        for (int k = 0; k < 2; ++k) out[i + 32 * k] = i < 32 ? c[k] + 100000.f * c[k + 2] : 0.f;
    """
    body = body.replace("out[i + 32 * k] = i < 32 ?", "if (i < 32) out[i + 32 * k] = true ?")
    given = mx.array(words.view(np.float32).reshape(-1))
    got = np.array(run(body, "ub", order=order, x=given, threads=32, block=32, dtype=mx.float32))
    want = a.astype(np.int64) @ b.astype(np.int64)
    for lane in range(32):
        g, c = divmod(lane, 4)
        for k in range(2):
            low, high = want[g, 2 * c + k] + 1 + k, want[g + 8, 2 * c + k] + 3 + k
            assert got[lane + 32 * k] == np.float32(
                np.float32(low) + np.float32(100000) * np.float32(high)
            )


def test_bytes_are_permuted_and_their_signs_replicated(run: Run) -> None:
    a, b = 0x83_22_11_7F, 0x44_F5_66_80
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    for selector in (0x7531, 0x6420, 0xBA98, 0x0000, 0xFEDC):
        nibbles = [selector >> 4 * k & 15 for k in range(4)]
        want = [(255 if pool[n & 7] & 128 else 0) if n & 8 else pool[n & 7] for n in nibbles]
        body = f"const u32 r = permute_bytes({a}u, {b}u, {selector}u);\nout[i] = (float)(r >> 8 * (i % 4) & 255u);"
        assert run(body, "ub").tolist()[:4] == want


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_one_lane_of_a_warp_leads_always_the_same(run: Run, order: str) -> None:
    out = run("out[i] = is_leader() + 2 * is_leader();", "ub", order=order)
    assert sorted(out[:32].tolist()) == [0] * 31 + [3]
    assert out[:32].tolist() == out[32:].tolist()


def test_exact_and_approximate_functions_are_as_near_as_cuda_says(run: Run) -> None:
    """`rough` runs differ from the C library in the last bits, and no more."""
    x = mx.linspace(-20, 20, 256)
    exact = np.exp2(np.array(x, dtype=np.float64))[:64]
    for mode, bits in (("ub", 0), ("rough", 2)):
        got = np.array(run("out[i] = exp2_fast(x[i]);", mode, x=x))
        off = np.abs(got / exact - 1).max()
        assert off < 2 ** (-23.0 + bits)
        assert (off > 2**-23.5) == (mode == "rough")


def test_the_largest_number_of_a_warp_may_be_below_zero(run: Run) -> None:
    out = run("out[i] = warp_most(-5.f - x[i]) + 1000.f * warp_most(x[i]);", "ub")
    assert out.tolist() == [-5 + 31_000] * 32 + [-37 + 63_000] * 32
