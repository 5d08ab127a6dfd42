"""The blocked attention for CPUs, and the reference, against softmax attention written out in float64."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.kernels import codec, cpu, proof, reference
from daemon.kernels.case import Attend, Case
from daemon.kernels.exponential import exp2
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16, Codec, parse_scheme

Float = npt.NDArray[np.float64]

HEADS, KV_HEADS, DIM_K, DIM_V = 6, 2, 64, 32
SINKS = 4
BACKENDS = {"reference": reference, "cpu": cpu}
LENGTHS = (1, 4, 5, 31, 32, 33, 36, 63, 64, 65, 100, 200)
SCHEMES = (
    "int8",
    "turbo8v3",
    "turbo0v4",
    "turbo5v0",
    "turbo4v4",
    "turbo3.5v3.5",
    "turbo3tv3t",
    "turbo2v2",
)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Attend:
    return Direct(BACKENDS[request.param])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two tiles, and rows divided from three on, so that short sequences have several."""
    monkeypatch.setattr(cpu, "BLOCK_VALUES", KV_HEADS * 64 * DIM_K)
    monkeypatch.setattr(cpu, "DIVIDED_VALUES", KV_HEADS * 64 * DIM_K)


class Direct:
    """Attends by *kernels* wherever something is packed, without a proof and without a way around them."""

    def __init__(self, kernels: Attend) -> None:
        self._kernels = kernels

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        packed = stored.packed_to > stored.packed_from
        return (self._kernels if packed else reference).attend(queries, stored, scale, mask, sinks)


def random(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def row(scheme: str, length: int, backend: Attend, *, tail: int = 0, **options: object) -> Row:
    made = Row(
        parse_scheme(scheme), sink_tokens=SINKS, tail_tokens=tail, attention=backend, **options
    )
    made.append(random(1, KV_HEADS, length, DIM_K), random(2, KV_HEADS, length, DIM_V))
    made.pack()
    return made


def as_stored(x: mx.array, kind: Codec, side: str, packed: slice) -> Float:
    """Return the vectors *x* as they come back from codes where they are *packed*."""
    whole = np.array(x, dtype=np.float64)
    if kind != FP16 and packed.stop > packed.start:
        codes = codec.encode(x[:, packed], kind, side)
        whole[:, packed] = np.array(codec.reconstruct(*codes, kind, side))
    return whole


def attended(queries: Float, keys: Float, values: Float, scale: float) -> Float:
    """Return causal softmax attention, for the newest queries."""
    out = np.empty((queries.shape[0], queries.shape[1], values.shape[2]))
    length, total = queries.shape[1], keys.shape[1]
    for head in range(queries.shape[0]):
        group = head // (queries.shape[0] // keys.shape[0])
        for at in range(length):
            seen = total - length + at + 1
            scores = scale * keys[group, :seen] @ queries[head, at]
            weights = np.exp(scores - scores.max())
            out[head, at] = weights @ values[group, :seen] / weights.sum()
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tail", [0, 32])
def test_every_length_gives_what_its_vectors_say(scheme: str, tail: int, backend: Attend) -> None:
    """One token, less than a tile, whole tiles and one more: packed up to the last token or with a tail."""
    for length in LENGTHS:
        made = row(scheme, length, backend, tail=tail)
        new = min(length, 3)
        queries = random(3, HEADS, new, DIM_K)

        got = made.attention.attend(queries, made.stored(), 0.2, None, None)

        stored = made.stored()
        packed = slice(stored.packed_from, stored.packed_to)
        keys = as_stored(random(1, KV_HEADS, length, DIM_K), made.scheme.k, "k", packed)
        values = as_stored(random(2, KV_HEADS, length, DIM_V), made.scheme.v, "v", packed)
        expected = attended(np.array(queries, dtype=np.float64), keys, values, 0.2)
        assert np.abs(np.array(got) - expected).max() < 1e-5, length


def cases() -> Iterator[Case]:
    """Yield what a call may have, each with some of the others."""
    for scheme, extras in {
        "int8": {"queries": 8, "dtype": mx.bfloat16},
        "turbo8v4": {"scaled_keys": True, "key_mean": "rotary", "mask": "boolean", "queries": 2},
        "turbo4v4": {"scaled_keys": True, "key_mean": "rotary", "learned_sinks": True},
        "turbo5v2": {"scaled_keys": True, "key_mean": "constant", "learned_sinks": True},
        "turbo3tv3t": {"scaled_keys": True, "key_mean": "rotary", "mask": "additive", "queries": 3},
        "turbo3v3": {"mask": "additive", "queries": 5, "learned_sinks": True},
        "turbo0v4": {"mask": "boolean", "dtype": mx.float16},
        "turbo3.5v0": {"scaled_keys": True, "dtype": mx.float16},
    }.items():
        kinds = parse_scheme(scheme)
        plain = {"dim_k": 80, "dim_v": 64, "n_heads": 6, "n_kv_heads": 2, "queries": 1}
        yield Case(k=kinds.k, v=kinds.v, **{"dtype": mx.float32, **plain, **extras})


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_agrees_with_the_reference_on_all_that_a_call_may_have(case: Case) -> None:
    assert cpu.refusal(case) is None
    assert proof.problem(cpu, case) is None


def test_affine_codes_are_left_to_the_reference() -> None:
    kinds = parse_scheme("affine4")
    case = Case(kinds.k, kinds.v, 64, 64, 4, 2, queries=1, dtype=mx.float32)

    assert cpu.refusal(case) == "affine4 is there to compare with, not to be fast"


def test_a_mask_may_be_the_same_for_all_tokens(backend: Attend) -> None:
    made = row("turbo4v4", 100, backend)
    queries = random(3, HEADS, 1, DIM_K)

    shifted = backend.attend(queries, made.stored(), 0.2, mx.full((1, 1, 1), -3.0), None)

    plain = backend.attend(queries, made.stored(), 0.2, None, None)
    assert mx.allclose(shifted, plain, atol=1e-5).item()


@pytest.mark.parametrize("scheme", ["int8", "turbo4v4", "turbo0v3"])
@pytest.mark.parametrize("bad", [mx.nan, mx.inf, -mx.inf])
def test_what_is_no_number_stays_in_its_row(scheme: str, bad: float, backend: Attend) -> None:
    """In keys, values and queries of one row of a batch, packed and not, the other rows see nothing of it."""
    lengths = (70, 40, 33)
    clean, spoiled = ([row(scheme, n, backend, tail=32) for n in lengths] for _ in range(2))
    for at, rows in enumerate((clean, spoiled)):
        broken = mx.full((KV_HEADS, 40, DIM_K), bad if at else 1.0)
        rows[1].append(broken, broken[..., :DIM_V])
        rows[1].append(*(random(seed, KV_HEADS, 40, dim) for seed, dim in ((4, DIM_K), (5, DIM_V))))
        rows[1].pack()
    queries = random(3, 3, HEADS, 1, DIM_K)
    holed = mx.where(mx.arange(3)[:, None, None, None] == 1, bad, queries)

    expected = BatchCache(clean).attend(queries, 0.2, None, None)
    got = BatchCache(spoiled).attend(holed, 0.2, None, None)

    assert mx.array_equal(got[0], expected[0]).item()
    assert mx.array_equal(got[2], expected[2]).item()
    assert not mx.all(mx.isfinite(got[1])).item()


@pytest.mark.parametrize("scheme", ["int8", "turbo4v4"])
def test_what_was_trimmed_off_a_tile_is_never_read(scheme: str, backend: Attend) -> None:
    kept = row(scheme, 45, backend)
    spoiled = row(scheme, 45, backend)
    spoiled.append(*(mx.full((KV_HEADS, 30, dim), mx.inf) for dim in (DIM_K, DIM_V)))
    spoiled.pack()
    spoiled.trim(30)
    queries = random(3, HEADS, 1, DIM_K)

    got, expected = (
        SequenceCache(r).attend(queries[None], 0.2, None, None) for r in (spoiled, kept)
    )

    assert mx.all(mx.isfinite(got)).item()
    assert mx.array_equal(got, expected).item()


def test_rows_of_any_length_answer_together_as_alone(backend: Attend) -> None:
    """An empty row gets nothing but padding, and zeros; the padding of the others is zeros too."""
    lengths = (0, 1, 31, 32, 33, 70)
    new = (0, 4, 1, 3, 4, 2)
    rows = [
        row("turbo4v4", n, backend, tail=32) if n else Row(parse_scheme("turbo4v4"), sink_tokens=SINKS, tail_tokens=32)
        for n in lengths
    ]  # fmt: skip
    alone = [SequenceCache(r.copy()) for r in rows]
    batch = BatchCache(rows)
    keys, values = random(4, 6, KV_HEADS, 4, DIM_K), random(5, 6, KV_HEADS, 4, DIM_V)
    queries = random(6, 6, HEADS, 4, DIM_K)

    batch.prepare(lengths=list(new), right_padding=[4 - n for n in new])
    batch.update_and_fetch(keys, values)
    got = batch.attend(queries, 0.2, "causal", None)

    for at, count in enumerate(new):
        assert mx.all(got[at, :, count:] == 0).item()
        if count:
            alone[at].update_and_fetch(keys[at : at + 1, :, :count], values[at : at + 1, :, :count])
            expected = alone[at].attend(queries[at : at + 1, :, :count], 0.2, "causal", None)
            assert mx.allclose(got[at : at + 1, :, :count], expected, atol=1e-6).item()


def test_powers_of_two_are_those_of_the_exponential() -> None:
    x = mx.concatenate([mx.linspace(-126.0, 0.0, 100_003), mx.array([0.0, -1.0, -2.5, -1e-9])])

    got = np.array(exp2(x), dtype=np.float64)

    expected = np.exp2(np.array(x, dtype=np.float64))
    assert np.abs(got / expected - 1).max() < 3e-7
    assert got[-4] == 1.0


def test_powers_of_two_end_in_zero_and_keep_what_is_no_number() -> None:
    got = exp2(mx.array([-127.0, -1e30, -mx.inf, mx.nan]))

    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    assert mx.isnan(got[3]).item()


def answer_of(made: Row) -> mx.array:
    """Return what a query finds in *made* by the CPU's kernels."""
    out: mx.array = cpu.attend(random(3, HEADS, 1, DIM_K), made.stored(), 0.125, None, None)
    mx.eval(out)
    return out


@pytest.mark.parametrize(("cores", "lanes"), [(1, 1), (2, 2), (3, 3), (64, 3)])
@pytest.mark.parametrize("tiles", [2, 3, 5, 12, 13])
def test_rows_divided_over_any_number_of_threads_answer_alike(
    monkeypatch: pytest.MonkeyPatch, cores: int, lanes: int, tiles: int
) -> None:
    made = row("turbo4v4", 32 * tiles - 5, Direct(cpu), tail=7)
    expected = reference.attend(random(3, HEADS, 1, DIM_K), made.stored(), 0.125, None, None)
    monkeypatch.setattr(cpu, "LANES", 3)
    monkeypatch.setattr(cpu, "_cores", lambda: cores)
    monkeypatch.setattr(cpu._THREAD, "lanes", None)
    before = mx.default_stream(mx.cpu)

    out = answer_of(made)

    assert mx.allclose(out, expected, atol=1e-5)
    assert mx.default_stream(mx.cpu) == before
    assert len(cpu._lanes()) == lanes


def _three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in three parts, one after the other."""
    monkeypatch.setattr(cpu, "_lanes", lambda: (mx.default_stream(mx.cpu),) * 3)


@pytest.mark.parametrize("scheme", ["int8", "turbo0v4", "turbo5v0"])
@pytest.mark.parametrize(("packed", "tail"), [(41, 0), (65, 0), (170, 0), (64, 40), (170, 40)])
@pytest.mark.parametrize("new", [1, 5])
def test_parts_of_a_row_have_each_of_its_tokens_once(
    monkeypatch: pytest.MonkeyPatch, scheme: str, packed: int, tail: int, new: int
) -> None:
    """Sinks fill more than a tile; the newest queries see more than the first of them."""
    _three_parts(monkeypatch)
    monkeypatch.setattr(cpu, "DIVIDED_VALUES", 0)
    made = Row(parse_scheme(scheme), sink_tokens=40, tail_tokens=tail)
    made.append(
        *(random(seed, KV_HEADS, packed + tail, dim) for seed, dim in ((1, DIM_K), (2, DIM_V)))
    )
    made.pack()
    queries, stored = random(3, HEADS, new, DIM_K), made.stored()

    got = cpu.attend(queries, stored, 0.2, None, None)

    expected = reference.attend(queries, stored, 0.2, None, None)
    assert mx.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("hidden", [slice(0, 120), slice(60, 200), slice(0, 1)])
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_may_hide_a_whole_part_of_a_row(
    monkeypatch: pytest.MonkeyPatch, hidden: slice, additive: bool
) -> None:
    _three_parts(monkeypatch)
    made = row("turbo4v4", 200, Direct(cpu), tail=7)
    queries, stored = random(3, HEADS, 1, DIM_K), made.stored()
    mask = mx.ones((1, 1, 200), dtype=mx.bool_)
    mask[..., hidden] = False
    if additive:
        mask = mx.where(mask, 0.0, -mx.inf)

    got = cpu.attend(queries, stored, 0.2, mask, None)

    assert len(list(cpu._parts(stored))) == 3
    assert mx.allclose(got, reference.attend(queries, stored, 0.2, mask, None), atol=1e-5)


@pytest.mark.parametrize(("heads", "dim", "queries"), [(3, 64, 3), (8, 128, 32), (1, 64, 64)])
def test_blocks_are_whole_tiles_that_blas_need_not_pack_if_that_is_not_too_few(
    monkeypatch: pytest.MonkeyPatch, heads: int, dim: int, queries: int
) -> None:
    monkeypatch.setattr(cpu, "BLOCK_VALUES", 2**20)

    tokens = cpu._block_tokens(heads, dim, queries)

    most = 2**20 // (heads * dim)
    assert tokens % 32 == 0
    assert most // 4 - 32 < tokens <= most
    assert tokens * dim * queries <= cpu.SMALL_PRODUCT or tokens > most - 32


def test_every_thread_of_python_has_streams_of_its_own() -> None:
    """MLX refuses a stream that another thread has made; engines are replaced by others in one process."""
    expected = answer_of(row("turbo4v4", 200, Direct(cpu)))
    found: list[npt.NDArray[np.float32]] = []

    for _ in range(3):
        thread = threading.Thread(
            target=lambda: found.append(np.array(answer_of(row("turbo4v4", 200, Direct(cpu)))))
        )
        thread.start()
        thread.join()

    assert len(found) == 3
    assert all(np.array_equal(each, np.array(expected)) for each in found)
