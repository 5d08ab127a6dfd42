"""What a prompt attends to, unpacked by CUDA's kernel, against float64: on an NVIDIA GPU where there is one, else on cudashim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import attention, codec, cuda, packing
from daemon.kernels.attention import Attention
from daemon.kernels.backend import Choice
from daemon.kernels.case import Case
from daemon.kernels.cuda import restoring
from daemon.kernels.reference import FUSED_QUERIES
from daemon.policy.schemes import FP16, TURBO4, parse_scheme
from tests.cudashim import shim
from tests.kernels.fake_kernels import FakeKernels
from tests.kernels.float64 import wide
from tests.kernels.restored_vectors import vectors
from tests.kernels.test_cuda_attention import FAST, GENERAL, Problem, build
from tests.metalshim import compiler

pytestmark = pytest.mark.skipif(
    not mx.cuda.is_available() and compiler.missing() is not None,
    reason=f"no NVIDIA GPU, and none can be emulated: {compiler.missing()}",
)

# a rounding, of which the largest of many are twice as large as most
TOLERANCE = {mx.float16: 4e-4, mx.bfloat16: 3e-3, mx.float32: 2e-6}


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """An NVIDIA GPU, or what executes its kernels on a CPU."""
    with nullcontext() if mx.cuda.is_available() else shim.installed():
        yield


def check(problem: Problem) -> None:
    _, stored, _, _ = build(problem)
    for side, kind in (("k", problem.k), ("v", problem.v)):
        got = restoring.restored(stored, side, problem.dtype)
        assert got.dtype == problem.dtype
        if kind == FP16:
            raw = stored.k if side == "k" else stored.v
            assert mx.array_equal(got, raw.joined()).item()
            continue
        want = vectors(stored, side)
        assert got.shape == want.shape
        assert np.linalg.norm(wide(got) - want) < TOLERANCE[problem.dtype] * np.linalg.norm(want)


# every width of either side, every dim, mean, order and dtype; all of them where they compile by themselves
SOME = [FAST[at] for at in (3, 4, 6, 7)] + [GENERAL[at] for at in (1, 5, 7, 8, 9, 10, 14, 15)]


@pytest.mark.parametrize("problem", [*FAST, *GENERAL] if mx.cuda.is_available() else SOME, ids=str)
def test_what_was_packed_is_as_it_was_decoded(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("sinks", [0, 4, 40])
@pytest.mark.parametrize("packed", [1, 31, 32, 33, 256])
def test_any_length_is_fine(packed: int, sinks: int) -> None:
    for tail in (0, 1, 63):
        check(Problem(dim_k=64, dim_v=64, n_kv=1, sinks=sinks, packed_to=sinks + packed, tail=tail, mean="rotary"))  # fmt: skip


def test_a_key_that_half_precision_can_hold_is_not_made_infinite() -> None:
    stored = build(Problem(dim_k=64, dim_v=64, n_kv=1, sinks=0, packed_to=32, tail=0))[1]
    huge = mx.full((1, 32, 64), 65504.0)
    codes, scales = codec.encode(huge, TURBO4, "k")
    packed = packing.Packed((codes, scales * 1.01), codec.encode(huge, TURBO4, "v"))
    stored = replace(stored, tiles=packing.pack(packed, stored.layout))

    keys = restoring.restored(stored, "k", mx.float16)

    assert mx.all(mx.isfinite(keys)).item()
    assert mx.max(keys).item() == 65504


def test_numbers_that_are_not_finite_stay_with_their_token() -> None:
    stored = build(Problem(dim_k=64, dim_v=64, n_kv=1, sinks=0, packed_to=32, tail=0))[1]
    codes, scales = codec.encode(mx.ones((1, 32, 64)), TURBO4, "k")
    scales = mx.where(mx.arange(32) == 7, mx.nan, scales).astype(mx.float16)
    tiles = packing.pack(packing.Packed((codes, scales), (codes, scales)), stored.layout)

    keys = restoring.restored(replace(stored, tiles=tiles), "k", mx.float16)

    assert np.flatnonzero(np.isnan(wide(keys)).all(axis=-1)[0]).tolist() == [7]
    assert np.isnan(wide(keys)).sum() == 64


@pytest.mark.parametrize(
    ("name", "mean"), [("turbo4v4", "rotary"), ("turbo0v3", "none"), ("turbo3tv4", "constant")]
)
def test_prompts_are_read_by_the_kernel_that_has_proved_itself(name: str, mean: str) -> None:
    kinds = parse_scheme(name)
    case = Case(
        kinds.k, kinds.v, 64, 64, n_heads=4, n_kv_heads=2, queries=300, dtype=mx.float16,
        scaled_keys=mean != "none", key_mean=mean, mask="boolean",
    )  # fmt: skip

    assert attention.on_this_device().prompt_choice(case) == Choice("cuda")


def test_prompts_of_a_kernel_that_is_wrong_go_to_the_reference() -> None:
    wrong = FakeKernels(spoil=lambda out: 1.1 * out)
    device = Attention("cuda", FakeKernels(), reading=wrong)
    queries, stored, _, _ = build(Problem(dim_k=64, dim_v=64, queries=FUSED_QUERIES + 4))

    out = device.attend(queries, stored, 0.1, None, None)

    choice = device.prompt_choice(Case.of(queries, stored, None, None))
    assert (choice.backend, choice.failed) == ("reference", True)
    assert "disagree with the reference" in (choice.reason or "")
    assert len(wrong.calls) == 1  # its proof
    assert mx.array_equal(out, attention.REFERENCE.attend(queries, stored, 0.1, None, None)).item()


def test_what_the_kernel_does_not_read_goes_to_the_reference_without_a_proof() -> None:
    affine = parse_scheme("affine4")
    case = Case(affine.k, affine.v, 64, 64, n_heads=2, n_kv_heads=2, queries=9, dtype=mx.float16)

    choice = Attention("cuda", cuda, reading=cuda.prompts).prompt_choice(case)

    assert choice == Choice("reference", "the CUDA kernels do not read affine4 keys")
