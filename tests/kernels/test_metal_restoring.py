"""What a prompt attends to, unpacked by Metal's kernel on a CPU emulation of Metal's language, against float64."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import codec, metal, packing
from daemon.kernels.attention import Attention
from daemon.kernels.backend import Choice
from daemon.kernels.case import Case
from daemon.kernels.metal import restoring
from daemon.kernels.proof import sample
from daemon.policy.schemes import FP16, TURBO4
from tests.kernels.emulated_metal import case, emulated, stretched
from tests.kernels.float64 import wide
from tests.kernels.restored_vectors import vectors
from tests.metalshim.launch import ORDERS
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

# a rounding, of which the largest of many are twice as large as most
TOLERANCE = {mx.float16: 4e-4, mx.bfloat16: 3e-3, mx.float32: 2e-6}

CASES = [
    case("int8", 80, scaled_keys=True, key_mean="rotary", dtype=mx.bfloat16),
    case("turbo5v4", 128, scaled_keys=True, key_mean="rotary", dtype=mx.float16),
    case("turbo4v3", 64, scaled_keys=True, key_mean="constant", n_heads=3, n_kv_heads=3),
    case("turbo3.5v2", 256, scaled_keys=True),
    case("turbo3tv3.5", 192, dim_v=128, dtype=mx.float16),
    case("turbo3v3t", 96, scaled_keys=True, key_mean="rotary"),
    case("turbo0v4", 64, dim_v=80, dtype=mx.float16),
    case("turbo2v0", 128, dtype=mx.bfloat16),
]


def check(asked: Case, mode: str, order: str = "forward", **shape: int) -> None:
    for seed in (0, 1):  # all channels rotate, and half of them
        stored = sample(asked, seed).stored
        if shape:
            stored = stretched(sample(asked, seed), **shape).stored
        for side, kind in (("k", asked.k), ("v", asked.v)):
            with emulated(mode, order):
                got = restoring.restored(stored, side, asked.dtype)
                mx.eval(got)
            if kind == FP16:
                raw = stored.k if side == "k" else stored.v
                assert mx.array_equal(got, raw.joined()).item()
                continue
            want = vectors(stored, side)
            assert (got.shape, got.dtype) == (want.shape, asked.dtype)
            assert np.linalg.norm(wide(got) - want) < TOLERANCE[asked.dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("asked", CASES, ids=str)
def test_what_was_packed_is_as_it_was_decoded(asked: Case) -> None:
    check(asked, "ub")


@pytest.mark.parametrize("order", ORDERS[1:])
def test_nothing_races_or_leaves_its_arrays(order: str) -> None:
    check(CASES[2], "check", order, packed_from=4, packed_to=75, tail=9)


@pytest.mark.parametrize(
    "shape", [(0, 1, 1), (0, 31, 2), (0, 32, 0), (4, 33, 31), (40, 64, 70), (3, 17, 0)], ids=str
)
def test_any_length_is_fine_and_compiles_nothing(shape: tuple[int, int, int]) -> None:
    packed_from, packed_to, tail = shape
    check(CASES[2], "ub", packed_from=packed_from, packed_to=packed_to, tail=tail)


def test_lengths_are_data_and_compile_nothing() -> None:
    given = sample(CASES[2])
    with emulated() as settings:
        for packed_to in (33, 96, 700):
            stored = stretched(given, packed_from=4, packed_to=packed_to, tail=5).stored
            mx.eval(restoring.restored(stored, "k", mx.float32))

        assert list(settings.sources.values()) == ["tqd_restore"]


def test_what_half_precision_can_hold_is_not_made_infinite_and_nan_stays_with_its_token() -> None:
    stored = stretched(sample(case("turbo4v4", 64, n_heads=1, n_kv_heads=1)), packed_from=0, packed_to=32, tail=0).stored  # fmt: skip
    huge = mx.full((1, 32, 64), 65504.0)
    codes, scales = codec.encode(huge, TURBO4, "k")
    scales = mx.where(mx.arange(32) == 7, mx.nan, scales * 1.01).astype(mx.float16)
    tiles = packing.pack(packing.Packed((codes, scales), (codes, scales)), stored.layout)

    with emulated():
        keys = restoring.restored(replace(stored, tiles=tiles), "k", mx.float16)
        mx.eval(keys)

    assert np.flatnonzero(np.isnan(wide(keys)).all(axis=-1)[0]).tolist() == [7]
    assert np.isnan(wide(keys)).sum() == 64
    assert np.nanmax(wide(keys)) == 65504


def test_prompts_are_read_by_the_kernel_that_has_proved_itself() -> None:
    with emulated() as settings:
        device = Attention("metal", metal, reading=metal.prompts)
        asked = case(
            "turbo8v4", 64, queries=300, scaled_keys=True, key_mean="rotary", mask="boolean"
        )

        assert device.prompt_choice(asked) == Choice("metal")
        assert "tqd_restore" in settings.sources.values()
        assert metal.prompts.refusal(case("affine4", 64)) == "Metal kernels do not read affine4"
