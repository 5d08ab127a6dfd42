"""Metal's attention on a CPU emulation of Metal's language, against attention in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import metal, proof, reference
from daemon.kernels.case import Case
from daemon.kernels.packing import TILE
from daemon.kernels.proof import Sample, sample
from daemon.policy.schemes import AFFINE8
from tests.kernels.emulated_metal import (
    TOLERANCE,
    case,
    distance,
    emulated,
    exact,
    stretched,
)
from tests.kernels.pairwise import pairwise
from tests.metalshim.launch import ORDERS
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim


AXES: dict[str, list[Any]] = {
    "k": ["8", "5", "4", "3.5", "3t", "3", "2", "0"],
    "v": ["8", "4", "3.5", "3t", "3", "2", "0"],
    "dims": [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)],
    "heads": [(4, 2), (5, 1), (3, 3), (16, 1), (2, 1)],
    "queries": [1, 2, 3, 5, 8],
    "dtype": [mx.float16, mx.bfloat16, mx.float32],
    "mask": ["none", "boolean", "additive"],
    "learned_sinks": [False, True],
    "keys": ["plain", "scaled", "constant", "rotary"],
}


def combination(
    k: str, v: str, dims: tuple[int, int], heads: tuple[int, int], keys: str, **others: Any
) -> Case:
    """Return the case with these properties; *keys* are packed as they are, scaled, or without their mean too."""
    return case(
        "int8" if k == v == "8" else f"turbo{k}v{v}",
        dim_k=dims[0],
        dim_v=dims[1],
        n_heads=heads[0],
        n_kv_heads=heads[1],
        scaled_keys=keys != "plain",
        key_mean=keys if keys in ("constant", "rotary") else "none",
        **others,
    )


COMBINATIONS = [
    combination(**row) for row in pairwise(AXES, lambda row: (row.get("k"), row.get("v")) != ("0", "0"))
]  # fmt: skip


def attended(given: Sample, **options: float) -> mx.array:
    out = metal.attend(given.queries, given.stored, given.scale, given.mask, given.sinks, **options)
    mx.eval(out)
    return out


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_two_properties_together_give_exact_attention_in_every_order_of_threads(
    combination: Case,
) -> None:
    assert metal.refusal(combination) is None
    given = sample(combination)

    with emulated() as settings:
        got = attended(given)

    assert [name for name, _ in settings.launches] == ["tqd_turn", "tqd_attend", "tqd_merge"]
    assert got.dtype == combination.dtype
    assert distance(got, exact(given)) < TOLERANCE[combination.dtype]
    for order in ORDERS[1:]:
        with emulated(order=order, seed=3):
            assert mx.array_equal(attended(given), got).item(), order


@pytest.mark.parametrize("combination", COMBINATIONS[::3], ids=str)
def test_nothing_races_or_leaves_its_arrays(combination: Case) -> None:
    given = stretched(
        sample(replace(combination, mask="none")), packed_from=4, packed_to=75, tail=9
    )

    with emulated("check") as settings:
        got = attended(given)

    assert all(not any(done.unwritten.values()) for _, done in settings.launches)
    assert distance(got, exact(given)) < TOLERANCE[combination.dtype]


@pytest.mark.parametrize("combination", COMBINATIONS[::6], ids=str)
def test_the_last_bits_of_another_machine_change_little(combination: Case) -> None:
    """Fast functions that are off by some units in the last place, sums in another order, denormal numbers flushed."""
    given = sample(combination)

    with emulated("rough"):
        assert distance(attended(given), exact(given)) < TOLERANCE[combination.dtype]


@pytest.mark.parametrize("scheme", ["turbo8v4", "turbo0v3"])
def test_lengths_are_data_and_compile_nothing(scheme: str) -> None:
    """Sinks, packed tokens and newest ones of any number, full and partial tiles, more tokens than blocks and fewer."""
    shapes = [(0, 1, 1), (0, 31, 2), (0, 32, 1), (4, 33, 31), (4, 32, 33), (40, 64, 70), (1, 300, 0), (4, 2500, 40)]  # fmt: skip
    given = sample(case(scheme, 64, n_heads=2, n_kv_heads=1))
    with emulated() as settings:
        for packed_from, packed_to, tail in shapes:
            other = stretched(given, packed_from=packed_from, packed_to=packed_to, tail=tail)
            assert distance(attended(other), exact(other)) < TOLERANCE[mx.float32], other.stored

        assert sorted(settings.sources.values()) == ["tqd_attend", "tqd_merge", "tqd_turn"]


@pytest.mark.parametrize("length", [7, 8])
def test_a_mask_may_be_smaller_than_what_metal_keeps_in_device_memory(length: int) -> None:
    given = sample(case("turbo4v4", 64, n_heads=1, n_kv_heads=1))
    given = stretched(given, packed_from=0, packed_to=length - 2, tail=2)
    given = replace(given, mask=mx.arange(length)[None, None] != 3)

    with emulated():
        assert distance(attended(given), exact(given)) < TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    ("scale", "shift"),
    [(1.0, -500.0), (40.0, 0.0), (0.0, 300.0)],
    ids=["far below", "wide", "flat"],
)
def test_scores_of_any_size_are_weighed_right(scale: float, shift: float) -> None:
    given = sample(case("turbo4v4", 64, queries=2, mask="additive"))
    assert given.mask is not None
    given = replace(given, scale=given.scale * scale, mask=given.mask + shift)

    with emulated():
        assert distance(attended(given), exact(given)) < TOLERANCE[mx.float32]


def test_slots_without_tokens_are_never_read() -> None:
    given = sample(case("turbo4v4", 64))
    stored = given.stored
    assert stored.tiles is not None
    with emulated():
        clean = np.array(attended(given))
        words = np.array(stored.tiles)
        scales = words[..., -32:].view(np.float16).reshape(*words.shape[:2], 2, TILE)
        slots = np.arange(words.shape[1] * TILE).reshape(-1, 1, TILE)
        unused = np.broadcast_to(
            (slots < stored.packed_from) | (slots >= stored.packed_to), scales.shape[1:]
        )
        scales[:, unused] = np.nan
        words[..., -32:] = scales.reshape(*words.shape[:2], -1).view(np.uint32)
        dirty = replace(given, stored=replace(stored, tiles=mx.array(words)))

        np.testing.assert_array_equal(np.array(attended(dirty)), clean)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["queries", "k", "v", "packed k", "packed v"])
def test_what_is_not_finite_stays_in_its_head(place: str, bad: float) -> None:
    """In a query, in the tail, or packed: whatever becomes of its own head, the others' numbers stay the same."""
    clean = sample(case("turbo4v4", 64, queries=2))
    stored = clean.stored
    if place == "queries":
        queries = np.array(clean.queries)
        queries[2:] = bad
        given = replace(clean, queries=mx.array(queries))
    elif place in ("k", "v"):
        raw = getattr(stored, place)
        tail = np.array(raw.tail)
        tail[1, 0] = bad
        given = replace(clean, stored=replace(stored, **{place: replace(raw, tail=mx.array(tail))}))
    else:
        assert stored.tiles is not None
        words = np.array(stored.tiles)
        words[..., -32:].view(np.float16)[1, 1, 0 if place == "packed k" else 32] = bad
        given = replace(clean, stored=replace(stored, tiles=mx.array(words)))

    with emulated():
        expected, got = attended(clean), attended(given)

    assert mx.array_equal(got[:2], expected[:2]).item()
    assert not mx.array_equal(got[2:], expected[2:], equal_nan=True).item()
    if np.isnan(bad):
        assert mx.isnan(got[2:]).all().item()


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    given = sample(case("turbo4v4", 64, queries=2, mask="boolean"))
    assert given.mask is not None
    mask = np.array(given.mask)
    mask[1] = False
    with emulated():
        got = attended(replace(given, mask=mx.array(mask)))

    assert mx.all(got[:, 1] == 0).item()
    assert mx.all(mx.any(got[:, 0] != 0, axis=-1)).item()


def test_values_of_tokens_that_do_not_count_are_not_read() -> None:
    """A value that is not a number shows whether it was read; the first token of a lane is always read."""
    given = sample(case("turbo8v4", 64, n_heads=1, n_kv_heads=1))
    stored = given.stored
    assert stored.tiles is not None
    words = np.array(stored.tiles)
    scales = words[..., -16:].view(np.float16)
    scales[0, 1, 23] = np.nan  # of the value of token 55
    words[..., -16:] = scales.view(np.uint32)
    mask = mx.where(mx.arange(stored.length) == 55, -30.0, 0.0)[None, None]
    given = replace(given, mask=mask, stored=replace(stored, tiles=mx.array(words)))

    with emulated():
        assert not mx.isnan(attended(given)).any().item()
        assert mx.isnan(attended(given, negligible=0.0)).all().item()


def test_tokens_that_do_not_count_still_weigh() -> None:
    given = sample(case("turbo8v4", 64, queries=2))
    with emulated():
        rough = attended(given, negligible=1.0)

    assert 0 < distance(rough, exact(given)) < 1.0


def test_rows_of_a_strided_buffer_are_read_in_place() -> None:
    """A side in full precision is a slice of a buffer with spare room, and a tail a transposed slice of what came in."""
    given = sample(case("turbo0v4", 64))
    stored = given.stored
    assert stored.k.head is not None
    assert stored.v.tail is not None
    roomy = mx.pad(stored.k.head, [(0, 0), (0, 100), (0, 0)])[:, : stored.length]
    turned = mx.contiguous(stored.v.tail.swapaxes(0, 1)).swapaxes(0, 1)
    spaced = mx.contiguous(stored.v.head.swapaxes(1, 2)).swapaxes(1, 2)
    other = replace(
        stored,
        k=replace(stored.k, head=roomy),
        v=replace(stored.v, head=spaced, tail=turned),
    )

    with emulated("check"):
        got = attended(replace(given, stored=other))

    assert distance(got, exact(given)) < TOLERANCE[mx.float32]


def test_far_positions_keep_the_bias_of_a_rotating_mean() -> None:
    """Angles of a tile are added up: at 100,000 tokens their rounding is what is left of the difference."""
    given = sample(case("int8", 64, scaled_keys=True, key_mean="rotary"))
    given = replace(given, stored=replace(given.stored, dropped=3125 * TILE))

    with emulated():
        assert distance(attended(given), exact(given)) < 3e-3


def test_the_reference_agrees_on_every_case() -> None:
    """So does the proof at load; here it must find nothing wrong, and not because it looked at nothing."""
    with emulated() as settings:
        assert proof.problem(metal, case("turbo4v4")) is None
        assert settings.launches
    given = sample(case("turbo4v4"))
    assert distance(given.run(reference), exact(given)) < TOLERANCE[mx.float32]


REFUSED = {
    "affine8": (case("turbo4v4", k=AFFINE8, v=AFFINE8), "do not read affine8"),
    "a head_dim": (case("turbo4v4", 112), "64, 80, 96, 128, 192, 256 values, not 112"),
    "many queries": (case("turbo4v4", queries=9), "8 query tokens at a time, not 9"),
    "uneven heads": (case("turbo4v4", n_heads=5), "5 query heads are no multiple of 2 KV heads"),
}


@pytest.mark.parametrize(("refused", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_what_the_kernels_cannot_do_is_refused_with_a_reason(refused: Case, reason: str) -> None:
    assert reason in str(metal.refusal(refused))


def test_threads_and_threadgroup_memory_leave_room_on_any_apple_gpu() -> None:
    with emulated() as settings:
        attended(sample(case("turbo4v4", 256)))

    assert max(done.group_memory for _, done in settings.launches) <= 17_000
