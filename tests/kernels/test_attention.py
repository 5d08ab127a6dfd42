"""Which kernels run, and what becomes of those that refuse, fail or are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import attention, proof, reference
from daemon.kernels.attention import Attention
from daemon.kernels.backend import Choice, backend_of, computed
from daemon.kernels.case import Case
from daemon.kernels.stored import RawSide
from daemon.policy.schemes import parse_scheme
from tests.kernels.fake_kernels import FakeKernels, not_compiled


def case(scheme: str = "turbo8v4", **changes: object) -> Case:
    parsed = parse_scheme(scheme)
    plain = Case(
        k=parsed.k, v=parsed.v, dim_k=64, dim_v=64, n_heads=4, n_kv_heads=2, queries=1, dtype=mx.float16
    )  # fmt: skip
    return replace(plain, **changes)


CASES = [
    case(),
    case("turbo0v4", dtype=mx.bfloat16),
    case("turbo4v0", queries=8),
    case("turbo3.5v2", dim_k=96, dim_v=32, dtype=mx.float32),
    case("affine4", mask="boolean", queries=3),
    case("int8", mask="additive", learned_sinks=True),
    case("turbo5v3", scaled_keys=True, n_heads=6, n_kv_heads=1),
    case("turbo4v4", scaled_keys=True, key_mean="constant"),
    case("turbo4v4", scaled_keys=True, key_mean="rotary", learned_sinks=True, dim_k=80),
]


@pytest.mark.parametrize(
    ("gpu", "metal", "cuda", "expected"),
    [
        (True, True, False, "metal"),
        (True, False, True, "cuda"),
        (True, False, False, "reference"),
        (False, True, False, "cpu"),  # a Mac that was told to compute on its CPU
        (False, False, True, "cpu"),
        (False, False, False, "cpu"),
    ],
)
def test_the_device_decides_on_the_backend(
    gpu: bool, metal: bool, cuda: bool, expected: str
) -> None:
    assert backend_of(gpu=gpu, metal=metal, cuda=cuda) == expected


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="this device is no CPU")
def test_a_cpu_proves_its_own_kernels_once_for_the_process() -> None:
    device = attention.on_this_device()

    assert device is attention.on_this_device()
    assert device.choice(case()) == Choice("cpu")


def test_without_kernels_there_is_no_reason_to_give() -> None:
    assert attention.REFERENCE.choice(case()) == Choice("reference")


@pytest.mark.parametrize("asked", CASES, ids=str)
def test_the_sample_of_a_case_is_of_that_case_and_finite(asked: Case) -> None:
    given = proof.sample(asked)

    assert Case.of(given.queries, given.stored, given.mask, given.sinks) == asked
    assert mx.all(mx.isfinite(given.run(reference).astype(mx.float32))).item()


@pytest.mark.parametrize("asked", CASES, ids=str)
def test_kernels_that_agree_with_the_reference_run(asked: Case) -> None:
    kernels = FakeKernels()
    attending = Attention("cuda", kernels)
    given = proof.sample(asked, seed=1)

    out = given.run(attending)

    assert attending.choice(asked) == Choice("cuda")
    assert kernels.calls == [asked] * 3  # two samples to prove it, and the answer
    assert mx.array_equal(out, given.run(reference))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (not_compiled, r"^the cuda kernels fail to attend on this device \(RuntimeError: \[cuda\] nvrtc: error: identifier is undefined\)$"),
        (lambda out: out * 1.01, r"^the cuda kernels disagree with the reference on this device \(by (0\.9|1\.0)\d%\)$"),
        (lambda out: mx.where(mx.arange(64) == 3, mx.nan, out), "^the cuda kernels give numbers that are not finite"),
        (lambda out: mx.where(mx.arange(64) == 3, mx.inf, out), "^the cuda kernels give numbers that are not finite"),
        (lambda out: out.astype(mx.float32), r"^the cuda kernels return mlx.core.float32\(4, 1, 64\) instead of"),
        (lambda out: out[:2], r"^the cuda kernels return mlx.core.float16\(2, 1, 64\) instead of"),
    ],
    ids=["do not compile", "off by 1 %", "nan", "infinite", "dtype", "shape"],
)  # fmt: skip
def test_kernels_that_fail_their_proof_never_answer(
    spoil: Callable[[mx.array], mx.array], reason: str
) -> None:
    attending = Attention("cuda", FakeKernels(spoil))
    given = proof.sample(case(), seed=1)

    assert mx.array_equal(given.run(attending), given.run(reference))
    choice = attending.choice(case())
    assert (choice.backend, choice.failed) == ("reference", True)
    assert re.match(reason, choice.reason or "")


def test_what_kernels_refuse_runs_on_the_reference_and_is_no_failure() -> None:
    kernels = FakeKernels(refuse=lambda asked: "no 3.5-bit codes" if asked.k.bits == 3.5 else None)
    attending = Attention("metal", kernels)
    refused, accepted = case("turbo3.5v4"), case("turbo3v4")

    for asked in (refused, accepted):
        given = proof.sample(asked, seed=1)
        assert mx.array_equal(given.run(attending), given.run(reference))

    assert attending.choice(refused) == Choice("reference", "no 3.5-bit codes")
    assert attending.choice(accepted) == Choice("metal")
    assert set(kernels.calls) == {accepted}


def test_a_case_proves_itself_once() -> None:
    kernels = FakeKernels()
    attending = Attention("cuda", kernels)

    for _ in range(3):
        attending.choice(case())

    assert kernels.calls == [case()] * 2  # two samples


def test_kernels_are_not_asked_for_prompts_nor_where_nothing_is_packed() -> None:
    kernels = FakeKernels(spoil=not_compiled)
    attending = Attention("cuda", kernels)
    long = proof.sample(case(queries=reference.FUSED_QUERIES + 1))
    unpacked = replace(
        proof.sample(case()),
        stored=replace(
            proof.sample(case()).stored,
            length=5, packed_from=0, packed_to=0, tiles=None,
            k=RawSide(mx.ones((2, 5, 64), dtype=mx.float16), None),
            v=RawSide(mx.ones((2, 5, 64), dtype=mx.float16), None),
        ),
    )  # fmt: skip

    for given in (long, unpacked):
        assert mx.array_equal(given.run(attending), given.run(reference))

    assert kernels.calls == []


def test_what_is_computed_leaves_the_hosts_memory() -> None:
    """A sum takes the memory of its first term: the other way around nothing would move."""

    def place(array: mx.array) -> int:
        mx.eval(array)
        address: int = np.array(array, copy=False).__array_interface__["data"][0]
        return address

    given = mx.array(np.arange(4096, dtype=np.int32))
    before = place(given)
    moved = computed(given)
    del given
    assert place(moved) != before
    assert moved.tolist() == list(range(4096))
