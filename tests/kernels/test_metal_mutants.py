"""Changes of one token in the kernels' sources: each must be noticed, or the comparisons prove little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import mlx.core as mx
import pytest

from daemon.kernels import encode, metal, packing
from daemon.kernels.metal import restoring, sources
from daemon.kernels.packing import TileLayout
from daemon.kernels.proof import Sample, sample
from daemon.policy.schemes import SCHEMES
from tests.kernels.emulated_metal import TOLERANCE, case, distance, exact, stretched
from tests.kernels.restored_vectors import vectors
from tests.metalshim import shim
from tests.metalshim.compiler import ShimError
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

Probe = Callable[[], bool]


def small(scheme: str, packed_to: int = 75, **changes: object) -> Sample:
    given = sample(case(scheme, 64, **changes))
    return stretched(given, packed_from=4, packed_to=packed_to, tail=9)


def right(given: Sample) -> bool:
    out = metal.attend(given.queries, given.stored, given.scale, given.mask, given.sinks)
    mx.eval(out)
    return distance(out, exact(given)) < TOLERANCE[mx.float32]


def rotary() -> bool:
    """With an odd number of query vectors: the last ones have a SIMD-group of their own."""
    return right(
        small("turbo4v3", dim_k=128, n_heads=6, queries=3, scaled_keys=True, key_mean="rotary")
    )


def masked() -> bool:
    """With scores far below zero and far apart."""
    given = small("turbo3.5v8", queries=3)
    mask = mx.random.normal((4, 3, given.stored.length), key=mx.random.key(1))
    return right(replace(given, mask=40 * mask - 500))


def sinking() -> bool:
    """With more blocks than the merge has SIMD-groups."""
    changes = {"learned_sinks": True, "scaled_keys": True, "key_mean": "constant"}
    return right(small("turbo5v2", 520, queries=2, **changes))


def trellis() -> bool:
    """With vectors of several lanes, so that codes have others before them in the same lane, in another, and at the end."""
    return right(small("turbo3tv3t"))


def encoding() -> bool:
    return encodes("turbo3v3.5")


def coded_by_trellis() -> bool:
    return encodes("turbo3tv3")


def encodes(scheme: str) -> bool:
    kinds = SCHEMES[scheme]
    layout = TileLayout(kinds.k, kinds.v, 80, 64)
    k, v = (mx.random.normal((2, 61, dim), key=mx.random.key(dim)) for dim in (80, 64))
    old = encode.encoded(k[:, :13], v[:, :13], layout, first=0, old=None)
    for first, kept in ((4, None), (13, old)):
        got = packing.unpack(metal.tiles(k, v, layout, first=first, old=kept), layout)
        expected = packing.unpack(encode.encoded(k, v, layout, first=first, old=kept), layout)
        for ours, theirs in ((got.k, expected.k), (got.v, expected.v)):
            assert ours is not None
            assert theirs is not None
            if not (
                mx.array_equal(ours[0], theirs[0]) and mx.allclose(ours[1], theirs[1], rtol=1e-3)
            ):
                return False
    return True


def restores() -> bool:
    """Keys that have lost a scale and a mean of which half rotates, tokens dropped, 3.5 bits beside 5."""
    given = stretched(
        sample(case("turbo5v3.5", 64, scaled_keys=True, key_mean="rotary"), seed=1),
        packed_from=3, packed_to=75, tail=9,
    )  # fmt: skip
    for side in ("k", "v"):
        got = restoring.restored(given.stored, side, mx.float32)
        mx.eval(got)
        if not distance(got, vectors(given.stored, side)) < 1e-5:
            return False
    return True


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MUTANTS: list[tuple[Probe, str, str, str]] = [
    (rotary, "attend", BARRIER, ""),
    (rotary, "attend", "mem_threadgroup", "mem_none"),
    (rotary, "attend", "token < packed_to :", "token <= packed_to :"),
    (rotary, "attend", "token >= packed_from && token", "token"),
    (rotary, "attend", "token < plain;", "token <= plain;"),
    (rotary, "attend", "slot * DIM_K + chunk,", "slot * DIM_V + chunk,"),
    (rotary, "attend", "words + K_SCALES", "words + V_SCALES"),
    (rotary, "attend", "total[q] *= shrink;", ""),
    (rotary, "attend", "sum[q][i] *= shrink;", ""),
    (rotary, "attend", "other = LANES / 2", "other = LANES / 4"),
    (rotary, "attend", "token <= length - new_tokens", "token < length - new_tokens"),
    (rotary, "attend", "a * c + b * s", "a * c - b * s"),
    (rotary, "attend", "b * c - a * s", "b * c + a * s"),
    (rotary, "attend", "turned[q][8 + i] * s", "turned[q][i] * s"),
    (rotary, "attend", "tile * 32 + dropped", "tile * 32"),
    (rotary, "attend", "tile += stride", "tile += stride + 1"),
    (masked, "attend", "common = max(", "common = min("),
    (rotary, "attend", "if (lane == 0)", "if (lane < 2)"),
    (rotary, "attend", "lane < LANES && in_values", "in_values"),
    (rotary, "attend", "first_query + q < end_query) {\n    if", "true) {\n    if"),
    (masked, "attend", "-1e30f", "0.0f"),
    (masked, "attend", "M_LOG2E_F", "1.0f"),
    (masked, "attend", "mask_shape[0] > 1 ? head : 0", "0"),
    (masked, "attend", "mask_shape[1] > 1 ? new_token : 0", "0"),
    (sinking, "attend", "score[q] += constants[n];", ""),
    (rotary, "turn", BARRIER, ""),
    (rotary, "turn", BARRIER + "\nif (thread_index == 0)", "if (thread_index == 0)"),
    (rotary, "turn", "row % NEW * queries", "row * queries"),
    (rotary, "turn", "const int kv_head = row / GROUPED;", "const int kv_head = row / NEW;"),
    (rotary, "turn", "basis[j * DIM + d]", "basis[d * DIM + j]"),
    (rotary, "turn", "query[d] * own + query[other]", "query[d] * own - query[other]"),
    (rotary, "turn", "query[other] * own - query[d]", "query[other] * own + query[d]"),
    (rotary, "turn", "* factor", ""),
    (sinking, "turn", "alike += query[d] * own;", ""),
    (sinking, "turn", "i < threads / 32", "i < 1"),
    (rotary, "merge", "shared_sums[0][j] * basis", "shared_sums[0][d] * basis"),
    (rotary, "merge", "value * share;\n}\n" + BARRIER, "value * share;\n}"),
    (restores, "restore", BARRIER + "\nif (any) {\n  const device", "if (any) {\n  const device"),
    (restores, "restore", BARRIER + "\nif (any) {\n  for", "if (any) {\n  for"),
    (restores, "restore", "token < packed_from && token < length", "token < packed_from - 1"),
    (restores, "restore", "token >= packed_to && token < length", "token >= packed_to"),
    (restores, "restore", "(token - packed_to) *", "(token - packed_from) *"),
    (restores, "restore", "first + SLOTS > packed_from", "first > packed_from"),
    (restores, "restore", "token % 32 * DIM + chunk", "slot * DIM + chunk"),
    (restores, "restore", "token % 32);", "slot);"),
    (restores, "restore", "basis[j * DIM + d]", "basis[d * DIM + j]"),
    (restores, "restore", "slot + k) / 4", "slot) / 4"),
    (restores, "restore", "token + dropped", "token"),
    (restores, "restore", "? turned : -turned", "? -turned : turned"),
    (restores, "restore", "scales[kv_head * DIM + d]", "scales[d]"),
    (restores, "restore", "mean[kv_head * DIM + d]", "mean[d]"),
    (masked, "codes", "24 - 8 *", "16 - 8 *"),
    (masked, "codes", "187u", "186u"),
    (masked, "codes", "group[4 + quarter / 2]", "group[4]"),
    (sinking, "codes", "& 3u) << shift", "& 1u) << shift"),
    (sinking, "codes", "16 * half_group", "8 * half_group"),
    (trellis, "codes", "first % TRELLIS ?", "true ?"),
    (trellis, "codes", "first + TRELLIS - 1", "first"),
    (trellis, "codes", "words, before - 1", "words, before"),
    (trellis, "codes", "8 * state + code", "4 * state + code"),
    (trellis, "codes", "& 1u) << 2)", "& 1u) << 1)"),
    (trellis, "codes", "at / 16 % 2", "0"),
    (trellis, "trellis", "max(distance, 32)", "max(distance, 31)"),
    (coded_by_trellis, "trellis", "4 * m + lane / 8", "4 * m + lane % 4"),
    (coded_by_trellis, "trellis", "u, unit, -NEAR", "u, unit, 0"),
    (coded_by_trellis, "trellis", "lane == int(state) ? 0", "true ? 0"),
    (coded_by_trellis, "trellis", "step >= NEAR", "step > NEAR"),
    (coded_by_trellis, "trellis", "clamp(value, -8.0f, 8.0f)", "clamp(value, -1.0f, 1.0f)"),
    (coded_by_trellis, "trellis", "uchar(state & 7)", "uchar(before & 7)"),
    (coded_by_trellis, "vectors", "DIM && !there", "DIM && there"),
    (sinking, "merge", BARRIER, ""),
    (sinking, "merge", "block < rotated_blocks", "block <= rotated_blocks"),
    (sinking, "merge", "largest = simd_max(largest);", ""),
    (sinking, "merge", "fast::exp2(sink - largest)", "0"),
    (sinking, "merge", "j < 8", "j < 7"),
    (encoding, "encode", BARRIER, ""),
    (encoding, "encode", "keeps && tile == 0", "keeps && tile == 1"),
    (encoding, "encode", "tile * 32 - first", "tile * 32"),
    (encoding, "vectors", "levels - 1 - code", "levels - code"),
    (encoding, "vectors", "cosine > closest", "cosine < closest"),
    (encoding, "vectors", "c * c", "c"),
    (encoding, "vectors", "11u * codes", "10u * codes"),
    (encoding, "vectors", "slot < kept", "slot <= kept"),
    (encoding, "vectors", "number < kept_numbers", "number <= kept_numbers"),
    (encoding, "vectors", "there ? nearest", "true ? nearest"),
]  # fmt: skip


@pytest.fixture
def _checked() -> Iterator[None]:
    with shim.installed("check"):
        yield


def forget() -> None:
    for made in (
        sources.turn_kernel,
        sources.attend_kernel,
        sources.merge_kernel,
        sources.encode_kernel,
        sources.restore_kernel,
    ):
        made.cache_clear()


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize(
    "probe",
    [rotary, masked, sinking, trellis, restores, encoding, coded_by_trellis],
    ids=lambda p: p.__name__,
)
def test_the_kernels_as_they_are_pass(probe: Probe) -> None:
    assert probe()


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize(
    ("probe", "name", "token", "other"), MUTANTS, ids=[f"{m[1]}: {m[2]}" for m in MUTANTS]
)
def test_a_mutant_is_noticed(
    probe: Probe, name: str, token: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources.source
    assert token in source(name)
    monkeypatch.setattr(
        sources,
        "source",
        lambda wanted: (
            source(wanted).replace(token, other, 1) if wanted == name else source(wanted)
        ),
    )
    forget()
    try:
        assert not noticed_nothing(probe)
    finally:
        forget()


def noticed_nothing(probe: Probe) -> bool:
    try:
        return probe()
    except ShimError as error:
        return "compile failed" in str(error)  # that is no mutant
