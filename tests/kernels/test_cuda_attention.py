"""The CUDA kernels against attention in float64: on an NVIDIA GPU where there is one, else on cudashim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from daemon.kernels import codebook, codec, cuda, encode, order, packing, rotation, step_proof
from daemon.kernels.case import Case
from daemon.kernels.cuda import encoding, launch, plan, rounding
from daemon.kernels.cuda.layer import layer_of
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.kernels.packing import TILE, Packed, TileLayout
from daemon.kernels.stepping import Leaving, Span, no_tiles
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import (
    FP16,
    INT8,
    TRELLIS3,
    TURBO2,
    TURBO3,
    TURBO3_5,
    TURBO4,
    TURBO5,
    Codec,
)
from tests.cudashim import shim
from tests.kernels.float64 import Float, wide
from tests.metalshim import compiler

# several splits of many tiles; on an emulation, as few tiles as several splits have
LONGEST = 9000 if mx.cuda.is_available() else 2200

pytestmark = pytest.mark.skipif(
    not mx.cuda.is_available() and compiler.missing() is not None,
    reason=f"no NVIDIA GPU, and none can be emulated: {compiler.missing()}",
)

BITS = {16: FP16, 8: INT8, 5: TURBO5, 4: TURBO4, 3: TURBO3, 2: TURBO2}


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """An NVIDIA GPU, or what executes its kernels on a CPU."""
    with nullcontext() if mx.cuda.is_available() else shim.installed():
        yield


@dataclass(frozen=True)
class Problem:
    """One call of attend: shapes, lengths, and what is on."""

    k: Codec = TURBO4
    v: Codec = TURBO4
    dim_k: int = 128
    dim_v: int = 128
    grouped: int = 4
    n_kv: int = 2
    queries: int = 1
    dtype: mx.Dtype = mx.float16
    sinks: int = 4
    packed_to: int = 203
    tail: int = 37
    dropped: int = 0
    mean: str = "none"  # or constant, rotary, partial, interleaved
    mean_size: float = 1.0
    query_size: float = 1.0
    logits: bool = False
    mask: str = "none"
    in_order: int | None = None
    seed: int = 0

    @property
    def length(self) -> int:
        return self.packed_to + self.tail


def keys_of(problem: Problem, rng: np.random.Generator) -> KeyTransform | None:
    if problem.mean == "none":
        return None
    dim = problem.dim_k
    shape = (problem.n_kv, dim)
    scale = mx.array(np.exp(0.3 * rng.standard_normal(shape)).astype(np.float32))
    mean = mx.array((problem.mean_size * rng.standard_normal(shape)).astype(np.float32))
    if problem.mean == "constant":
        return KeyTransform(scale, mean, None)
    rotated = dim // 2 if problem.mean == "partial" else dim
    rope = nn.RoPE(rotated, traditional=problem.mean == "interleaved", base=500000.0)
    return KeyTransform(scale, mean, Rotary(rope, dim))


def build(problem: Problem) -> tuple[mx.array, Stored, mx.array | None, mx.array | None]:
    """Return queries, what is stored, a mask and learned sinks; unused slots hold NaN scales and 0xff codes."""
    rng = np.random.default_rng(problem.seed)
    p = problem
    wanted = order.native(p.k, p.v, p.dim_k, p.dim_v) if p.in_order is None else p.in_order
    layout = TileLayout(p.k, p.v, p.dim_k, p.dim_v, wanted)
    tiles = -(-p.packed_to // TILE) + 2
    used = np.zeros(tiles * TILE, dtype=bool)
    used[p.sinks : p.packed_to] = True

    def side(kind: Codec, dim: int, name: str) -> tuple[RawSide, tuple[mx.array, mx.array] | None]:
        plain = rng.standard_normal((p.n_kv, p.length, dim)).astype(np.float32)
        if kind == FP16:
            return RawSide(mx.array(plain).astype(p.dtype), None), None
        vectors = mx.array(rng.standard_normal((p.n_kv, tiles * TILE, dim)).astype(np.float32))
        codes, scales = codec.encode(vectors, kind, name)
        codes = mx.where(mx.array(used)[None, :, None], codes, 2 ** int(kind.bits) - 1)
        scales = mx.where(mx.array(used)[None], scales, mx.array(np.float16("nan")))
        head = mx.array(plain[:, : p.sinks]).astype(p.dtype) if p.sinks else None
        tail = mx.array(plain[:, p.packed_to :]).astype(p.dtype) if p.tail else None
        return RawSide(head, tail), (codes.astype(mx.uint8), scales)

    k, v = side(p.k, p.dim_k, "k"), side(p.v, p.dim_v, "v")
    stored = Stored(
        layout=layout,
        length=p.length,
        packed_from=p.sinks,
        packed_to=p.packed_to,
        tiles=packing.pack(Packed(k[1], v[1]), layout),
        k=k[0],
        v=v[0],
        n_kv_heads=p.n_kv,
        dropped=p.dropped,
        keys=keys_of(p, rng),
    )
    n_heads = p.n_kv * p.grouped
    queries = p.query_size * rng.standard_normal((n_heads, p.queries, p.dim_k))
    logits = mx.array(rng.standard_normal(n_heads).astype(np.float32)) if p.logits else None
    mask = None
    if p.mask == "boolean":
        mask = mx.array(rng.random((p.queries, p.length)) < 0.7)
    elif p.mask == "additive":
        mask = mx.array(rng.standard_normal((n_heads, p.queries, p.length)).astype(np.float32))
    return mx.array(queries.astype(np.float32)).astype(p.dtype), stored, mask, logits


def expected(
    queries: mx.array,
    stored: Stored,
    scale: float,
    mask: mx.array | None,
    logits: mx.array | None,
) -> Float:
    """Attend in float64, token by token, from the codes themselves."""
    layout, n_kv = stored.layout, stored.n_kv_heads
    begin, end, length = stored.packed_from, stored.packed_to, stored.length
    q = wide(queries)
    n_heads, n_queries, _ = q.shape
    kv_of = np.arange(n_heads) // (n_heads // n_kv)
    packed = packing.unpack(stored.tiles_in_use(), layout)
    scores = np.zeros((n_heads, n_queries, length))
    values = np.zeros((n_kv, length, layout.dim_v))

    def plain(raw: RawSide, dim: int) -> Float:
        out = np.zeros((n_kv, length, dim))
        if raw.head is not None:
            out[:, : raw.head.shape[1]] = wide(raw.head)
        if raw.tail is not None:
            out[:, end:] = wide(raw.tail)
        return out

    def decoded(side: tuple[mx.array, mx.array], kind: Codec) -> Float:
        numbers, factors = codec.decode(side[0][:, begin:end], side[1][:, begin:end], kind)
        return wide(numbers) * wide(factors)[..., None]

    scores += np.einsum("hld,htd->hlt", q, plain(stored.k, layout.dim_k)[kv_of])
    if packed.k is not None:
        turn = wide(rotation.rotate(mx.eye(layout.dim_k), "k"))
        asked = q
        if stored.keys is not None:
            asked = q * wide(stored.keys.scale)[kv_of][:, None]
        scores[..., begin:end] = np.einsum(
            "hld,htd->hlt", asked @ turn, decoded(packed.k, layout.k)[kv_of]
        )
        keys = stored.keys
        if keys is not None and keys.mean is not None:
            shift = wide(keys.mean)[:, None]
            if keys.rotary is not None:
                first, last = stored.packed_positions
                shift = wide(keys.rotary.shift(keys.mean, first, last - first))
            shift = np.broadcast_to(shift, (n_kv, end - begin, layout.dim_k))
            scores[..., begin:end] += np.einsum("hld,htd->hlt", q, shift[kv_of])
    values += plain(stored.v, layout.dim_v)
    if packed.v is not None:
        turn = wide(rotation.rotate(mx.eye(layout.dim_v), "v"))
        values[:, begin:end] = decoded(packed.v, layout.v) @ turn.T
    scores *= scale
    if mask is None:
        newest = np.arange(length - n_queries, length)[:, None]
        scores = np.where(newest >= np.arange(length)[None], scores, -np.inf)
    elif mask.dtype == mx.bool_:
        scores = np.where(np.array(mask), scores, -np.inf)
    else:
        scores = scores + wide(mask)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if logits is not None:
        total = total + np.exp(wide(logits)[:, None, None] - top)
    return np.einsum("hlt,htd->hld", weights / total, values[kv_of])


def check(problem: Problem, *, fast: bool) -> float:
    """Return the relative error of attend on *problem*, the same twice."""
    queries, stored, mask, logits = build(problem)
    grouped = plan.is_fast(stored.layout, problem.grouped, problem.queries, masked=mask is not None)
    layer = layer_of(stored.layout, stored.n_kv_heads, stored.keys) if grouped else None
    assert (layer is not None) == fast
    scale = problem.dim_k**-0.5
    first = launch.attend(queries, stored, scale, mask, logits)
    again = launch.attend(queries, stored, scale, mask, logits)
    assert first.dtype == queries.dtype
    want = expected(queries, stored, scale, mask, logits)
    assert first.shape == want.shape
    assert mx.array_equal(first, again).item()
    got = wide(first)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def limit(problem: Problem) -> float:
    rounding = {mx.float16: 1e-3, mx.bfloat16: 6e-3, mx.float32: 8e-4}[problem.dtype]
    return rounding + 1e-3 * problem.mean_size * problem.query_size * (problem.mean != "none")


FAST = [
    Problem(),
    Problem(dtype=mx.bfloat16, logits=True),
    Problem(dtype=mx.float32),
    Problem(v=TURBO3, mean="rotary"),
    Problem(k=INT8, mean="rotary", dtype=mx.bfloat16, dropped=96, logits=True),
    Problem(k=INT8, v=INT8, mean="constant", grouped=1),
    Problem(k=TURBO5, mean="interleaved", grouped=3),
    Problem(k=TURBO3, v=TURBO2, mean="partial", grouped=2),
    Problem(k=TURBO2, v=TURBO3, grouped=8, mean="rotary"),
    Problem(k=TURBO4, v=INT8, grouped=7, n_kv=1),
    Problem(dim_k=64, dim_v=64, mean="rotary", n_kv=8),
    Problem(dim_k=64, dim_v=64, k=INT8, v=TURBO3, grouped=7),
    Problem(dim_k=64, dim_v=64, k=TURBO5, v=TURBO2, grouped=8, mean="rotary"),
    Problem(dim_k=64, dim_v=64, k=TURBO3, v=INT8, grouped=1, dtype=mx.bfloat16),
]


@pytest.mark.parametrize("problem", FAST, ids=str)
def test_the_fast_kernel_agrees_with_float64(problem: Problem) -> None:
    assert check(problem, fast=True) < limit(problem)


@pytest.mark.parametrize("sinks", [0, 4, 40])
@pytest.mark.parametrize("packed", [1, 31, 32, 33, 256, 1025, LONGEST])
@pytest.mark.parametrize("mean", ["none", "rotary"])
def test_any_length_is_fine(packed: int, sinks: int, mean: str) -> None:
    for tail in (0, 1, 63):
        problem = Problem(sinks=sinks, packed_to=sinks + packed, tail=tail, mean=mean, seed=packed)
        assert check(problem, fast=True) < limit(problem), tail


def test_large_scores_and_large_means_stay_within_their_bound() -> None:
    for size in (20.0, 60.0):
        assert check(Problem(query_size=size, packed_to=2000), fast=True) < 5e-3
    problem = Problem(mean="rotary", mean_size=10.0, packed_to=4000, dropped=124_000)
    assert check(problem, fast=True) < limit(problem)


GENERAL = [
    Problem(in_order=order.CANONICAL, grouped=16),
    Problem(in_order=order.CANONICAL, k=INT8, v=TURBO3, mean="rotary", mask="boolean"),
    Problem(queries=8, mean="rotary"),
    Problem(queries=3, grouped=16, logits=True, dtype=mx.bfloat16, k=TURBO3, v=TURBO2),
    Problem(mask="additive", k=TURBO5, v=INT8, mean="partial", dtype=mx.float32),
    Problem(dim_k=80, dim_v=80, mean="rotary", queries=2),
    Problem(dim_k=96, dim_v=96, k=INT8, v=TURBO3, grouped=1, mean="partial", logits=True),
    Problem(dim_k=192, dim_v=128, k=TURBO3, v=TURBO4, queries=4, mean="constant"),
    Problem(dim_k=256, dim_v=256, k=TURBO5, v=TURBO2, mean="interleaved", dtype=mx.bfloat16),
    Problem(k=FP16, grouped=5, queries=2, dtype=mx.bfloat16),
    Problem(v=FP16, mean="rotary", dtype=mx.float32),
    Problem(k=FP16, v=TURBO3, dim_k=64, dim_v=256, mask="boolean"),
    Problem(k=TURBO2, v=FP16, dim_k=96, dim_v=64, queries=5, logits=True),
    Problem(k=INT8, v=INT8, dim_k=64, dim_v=64, queries=8, grouped=2),
    Problem(k=TURBO3_5, v=TURBO3_5, mean="rotary", queries=2),
    Problem(k=TRELLIS3, v=TRELLIS3, dim_k=80, dim_v=80, mean="rotary", logits=True),
    Problem(k=TURBO4, v=TRELLIS3, dim_k=128, dim_v=64, dtype=mx.bfloat16),
    Problem(k=TRELLIS3, v=TURBO3_5, dim_k=64, dim_v=192, grouped=7, mask="additive"),
]


@pytest.mark.parametrize("problem", GENERAL, ids=str)
def test_the_general_kernel_agrees_with_float64(problem: Problem) -> None:
    assert check(problem, fast=False) < limit(problem)


def test_the_general_kernel_takes_any_length() -> None:
    for packed in (1, 31, 32, 33, 1025):
        problem = Problem(
            in_order=order.CANONICAL, packed_to=4 + packed, tail=packed % 3, seed=packed
        )
        queries, stored, _, _ = build(problem)
        want = expected(queries, stored, 0.1, None, None)
        got = wide(launch.attend(queries, replace(stored), 0.1, None, None))
        assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("rows", [1, 3, 9, 40])
def test_a_step_of_ragged_rows_attends_and_takes_in_the_newest_token(rows: int) -> None:
    """In one node: rows of many lengths, one all in full precision, with slots of tokens that have left."""
    lengths = [33, 203, 1000, 60, LONGEST]
    problems = [
        Problem(packed_to=lengths[i % 5], tail=37 - i % 7, mean="rotary", seed=i, n_kv=2)
        for i in range(10)
    ]
    some = [build(problem) for problem in problems[:rows]]
    built = [some[i % 10] for i in range(rows)]
    transform = built[0][1].keys
    stored = [replace(each, keys=transform) for _, each, _, _ in built]
    if rows > 1:
        short = stored[1]
        stored[1] = replace(
            short, packed_from=0, packed_to=0, length=4 + problems[1].tail, tiles=None
        )
    queries = mx.stack([each for each, *_ in built])
    left = [2 * (row.packed_to > 0) for row in stored]
    sides = [mx.stack([row.k.joined(), row.v.joined()]) for row in stored]
    plain = mx.stack([spaced(side[:, :, :-1], gap) for side, gap in zip(sides, left, strict=True)])
    fresh = [mx.stack([side[which, :, -1:] for side in sides]) for which in (0, 1)]
    spans = tuple(
        Span(row.length, row.packed_from, row.packed_to, 0, gap)
        for row, gap in zip(stored, left, strict=True)
    )
    nothing = no_tiles(2, stored[0].layout.words)
    tiles = [nothing if row.tiles is None else row.tiles for row in stored]
    layer = layer_of(stored[0].layout, 2, transform)
    assert layer is not None

    for splits in (1, 5, 40):
        got, following = launch.fast(
            queries,
            (fresh[0], fresh[1]),
            plain,
            tiles,
            launch.spans_of(spans, fresh=True),
            layer,
            128**-0.5,
            splits,
        )
        for index, row in enumerate(stored):
            one = queries[index]
            want = (
                attended(one, row)
                if row.tiles is None
                else expected(one, row, 128**-0.5, None, None)
            )
            off = np.linalg.norm(wide(got[index]) - want) / np.linalg.norm(want)
            assert off < 2e-3, (splits, index)
            count = sides[index].shape[2]
            assert mx.array_equal(following[index][:, :, :count], sides[index])


def spaced(side: mx.array, gap: int) -> mx.array:
    """Return *side* (2, H, n, D) in 64 slots, with a gap of NaN behind four sinks."""
    gone = mx.full((*side.shape[:2], gap, side.shape[3]), mx.nan, dtype=side.dtype)
    side = mx.concatenate([side[:, :, :4], gone, side[:, :, 4:]], axis=2)
    return mx.pad(side, [(0, 0), (0, 0), (0, 64 - side.shape[2]), (0, 0)])


def attended(queries: mx.array, stored: Stored) -> Float:
    """Attend in float64 to what is all in full precision."""
    k, v = (np.repeat(wide(side.joined()), 4, axis=0) for side in (stored.k, stored.v))
    scores = np.einsum("hld,htd->hlt", wide(queries), k) * 128**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: Float = np.einsum("hlt,htd->hld", weights / weights.sum(axis=-1, keepdims=True), v)
    return out


@pytest.mark.parametrize(
    ("k", "mean", "dim"),
    [
        (TURBO4, "none", 128),
        (TURBO4, "rotary", 128),
        (INT8, "partial", 128),
        (TURBO3, "interleaved", 64),
    ],
)
def test_steps_prove_themselves_and_fold_as_the_reference_does(
    k: Codec, mean: str, dim: int
) -> None:
    kinds = {"none": "none", "rotary": "rotary", "partial": "rotary", "interleaved": "rotary"}
    case = Case(
        k, TURBO4, dim, dim, n_heads=8, n_kv_heads=2, queries=1, dtype=mx.float16,
        scaled_keys=mean != "none", key_mean=kinds[mean],
    )  # fmt: skip
    for room in (1, 8):
        assert step_proof.problem(cuda, case, room) is None
    rng = np.random.default_rng(1)
    layout = TileLayout(k, TURBO4, dim, dim, order.FRAGMENTS)
    keys = keys_of(Problem(mean=mean, dim_k=dim), rng)
    stepper = cuda.stepper(case, layout, keys, 0.1)
    assert stepper is not None
    plain = mx.array(rng.standard_normal((3, 2, 2, 68, dim)).astype(np.float32)).astype(mx.float16)
    leaving = (Leaving(2, 4, 4, 28, 4), Leaving(0, 7, 0, 32, 4_016))

    folded = stepper.fold(plain, leaving)

    for at, each in enumerate(leaving):
        tokens, values = plain[each.row][:, :, each.slot : each.slot + each.tokens]
        if keys is not None:
            tokens = keys.centered(tokens, each.position)
        want = encode.encoded(tokens, values, layout, first=each.first, old=None)
        assert encode.difference(folded[at], want, layout) is None


def test_numbers_that_are_not_finite_stay_with_their_head() -> None:
    queries, stored, _, _ = build(Problem())
    spoiled = mx.where(mx.arange(queries.shape[0])[:, None, None] == 2, mx.nan, queries)
    out = wide(launch.attend(spoiled.astype(queries.dtype), stored, 0.1, None, None))
    assert not np.isfinite(out[2]).any()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 3.5, 4, 5])
def test_vectors_are_rounded_as_the_codec_does_on_a_cpu(bits: float, dim: int) -> None:
    assert rounds_well(bits, dim, (3, 50), seed=dim)


def rounds_well(bits: float, dim: int, shape: tuple[int, ...], seed: int) -> bool:
    """Whether codes are those of the best stretch, and their overlap with the vectors is what it is."""
    u = np.random.default_rng(seed).standard_normal((*shape, dim))
    u = mx.array((u * dim**0.5 / np.linalg.norm(u, axis=-1, keepdims=True)).astype(np.float32))
    codes, overlap = rounding.closest(u, bits, codec.STRETCHES)
    levels = codebook.centroids(bits, dim)
    taken, wide_u = levels[np.array(codes)], wide(u)
    along = (taken * wide_u).sum(axis=-1)
    cosine = along**2 / (taken**2).sum(axis=-1)
    best = np.zeros_like(cosine)
    for stretch in codec.STRETCHES:
        near = levels[np.abs(wide_u[..., None] * stretch - levels).argmin(axis=-1)]
        best = np.maximum(best, (near * wide_u).sum(axis=-1) ** 2 / (near**2).sum(axis=-1))
    return np.allclose(wide(overlap), along, rtol=1e-5) and np.allclose(cosine, best, rtol=1e-4)


@pytest.mark.parametrize(
    ("k", "v", "dim"),
    [
        (TURBO4, TURBO4, 128),
        (INT8, TURBO3, 128),
        (TURBO5, TURBO2, 64),
        (TURBO3, INT8, 64),
        (TURBO2, TURBO4, 128),
    ],
)
def test_tiles_encoded_in_one_node_hold_what_the_codec_makes(k: Codec, v: Codec, dim: int) -> None:
    rng = np.random.default_rng(3)
    layout = TileLayout(k, v, dim, dim, order.FRAGMENTS)
    keys = mx.array(rng.standard_normal((2, 157, dim)).astype(np.float32))
    values = mx.array(rng.standard_normal((2, 157, dim)).astype(np.float32)).astype(mx.bfloat16)
    for first in (0, 4, 40):
        made = encoding.tiles(keys, values, layout, first=first)
        got = packing.unpack(made, layout)
        for side, kind, plain, coded in (("k", k, keys, got.k), ("v", v, values, got.v)):
            assert coded is not None
            window = slice(first, first + 157)
            outside = [mx.sum(mx.abs(part[:, :first])).item() for part in coded]
            outside += [mx.sum(mx.abs(part[:, first + 157 :])).item() for part in coded]
            assert not any(outside)
            mine = codec.reconstruct(coded[0][:, window], coded[1][:, window], kind, side)
            theirs = codec.reconstruct(*codec.encode(plain, kind, side), kind, side)
            # by their errors: of two codes as good, either may be taken
            size = np.linalg.norm(wide(plain), axis=-1)
            off = np.linalg.norm(wide(mine) - wide(plain), axis=-1) / size
            known = np.linalg.norm(wide(theirs) - wide(plain), axis=-1) / size
            assert np.abs(off - known).max() < 5e-3, side
            assert np.abs(off.mean() - known.mean()) < 1e-4, side
