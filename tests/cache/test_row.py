from __future__ import annotations

import copy
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.cache.row import Row
from daemon.kernels import codec, reference
from daemon.kernels.keys import KeyTransform
from daemon.policy.schemes import FP16, SCHEMES, Scheme, parse_scheme

HEADS, DIM_K, DIM_V = 2, 32, 64
PACKED = sorted(set(SCHEMES) - {"fp16"})


def tokens(count: int, *, seed: int = 0) -> tuple[mx.array, mx.array]:
    k, v = mx.random.split(mx.random.key(seed))
    return mx.random.normal((HEADS, count, DIM_K), key=k), mx.random.normal(
        (HEADS, count, DIM_V), key=v
    )


def filled(
    scheme: str, count: int, *, step: int = 17, sinks: int = 4, tail: int = 32, seed: int = 0
) -> Row:
    row = Row(parse_scheme(scheme), sink_tokens=sinks, tail_tokens=tail)
    keys, values = tokens(count, seed=seed)
    for start in range(0, count, step):
        row.append(keys[:, start : start + step], values[:, start : start + step])
    return row


def plain_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, packed: range, scheme: Scheme
) -> mx.array:
    """Softmax attention over reconstructed vectors, written out: the oracle of every backend."""
    k = with_packed(keys, packed, scheme, "k")
    v = with_packed(values, packed, scheme, "v")
    repeat = queries.shape[0] // HEADS
    scores = queries @ mx.repeat(k, repeat, axis=0).swapaxes(-1, -2) * DIM_K**-0.5
    length, total = scores.shape[-2:]
    seen = mx.arange(total - length, total)[:, None] >= mx.arange(total)[None]
    return mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ mx.repeat(v, repeat, axis=0)


def with_packed(x: mx.array, packed: range, scheme: Scheme, side: str) -> mx.array:
    kind = scheme.k if side == "k" else scheme.v
    if kind is FP16 or not packed:
        return x
    middle = x[:, packed.start : packed.stop]
    return mx.concatenate(
        [
            x[:, : packed.start],
            codec.reconstruct(*codec.encode(middle, kind, side), kind, side),
            x[:, packed.stop :],
        ],
        axis=1,
    )


@pytest.mark.parametrize("scheme", [*PACKED, "fp16"])
@pytest.mark.parametrize("count", [1, 3, 31, 32, 33, 69, 100, 200])
@pytest.mark.parametrize("queries", [1, 5, 16])
def test_attention_equals_plain_attention_over_reconstructed_vectors(
    scheme: str, count: int, queries: int
) -> None:
    queries = min(queries, count)
    row = filled(scheme, count)
    keys, values = tokens(count)
    stored = row.stored()
    q = mx.random.normal((6, queries, DIM_K), key=mx.random.key(9))

    got = reference.attend(q, stored, DIM_K**-0.5, None, None)

    packed = range(stored.packed_from, stored.packed_to)
    expected = plain_attention(q, keys, values, packed=packed, scheme=parse_scheme(scheme))
    assert mx.allclose(got, expected, atol=2e-4)


@pytest.mark.parametrize("scheme", PACKED)
def test_only_sinks_and_tail_stay_in_full_precision(scheme: str) -> None:
    row = filled(scheme, 300, step=1)

    stored = row.stored()

    assert (stored.packed_from, stored.packed_to % 32) == (4, 0)
    # the newest token arrived after the tail was folded to 32 to 63 tokens
    assert 33 <= stored.length - stored.packed_to <= 64


@pytest.mark.parametrize("step", [1, 50, 400])
def test_a_fold_of_several_tiles_leaves_the_tail_at_once(step: int) -> None:
    """turbo4-delegated: between 256 and 383 of the newest tokens are in full precision, whatever arrives."""
    row = Row(parse_scheme("turbo0v4"), sink_tokens=4, tail_tokens=256, fold_tokens=128)
    keys, values = tokens(900)
    seen = set()
    for start in range(0, 900, step):
        row.append(keys[:, start : start + step], values[:, start : start + step])
        row.pack()
        seen.add(row.stored().packed_to)
        if row.length >= 384:
            assert 256 <= row.length - row.stored().packed_to < 384

    assert all(end % 128 == 0 for end in seen)
    assert max(seen) == 640
    assert row.copy().fresh().fold_tokens == 128


@pytest.mark.parametrize(
    ("scheme", "taken"),
    [("int8", True), ("turbo5v4", True), ("turbo0v4", False), ("affine8", False)],
)
def test_only_rotated_keys_lose_their_mean(scheme: str, taken: bool) -> None:
    """affine8 and affine4 are what everyone knows under that name: nothing is done to keys before."""
    transform = KeyTransform(mx.ones((HEADS, DIM_K)), None, None)
    row = Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=32, keys=transform)

    assert (row.keys is transform) is taken


def test_how_many_tokens_fold_together_does_not_change_their_codes() -> None:
    small, large = (
        Row(parse_scheme("turbo5v3.5"), sink_tokens=4, tail_tokens=32, fold_tokens=fold)
        for fold in (32, 128)
    )
    for row in (small, large):
        row.append(*tokens(288))
        row.pack()

    assert (small.stored().packed_to, large.stored().packed_to) == (256, 256)
    assert mx.array_equal(small.stored().tiles_in_use(), large.stored().tiles_in_use())


def test_without_sinks_and_tail_everything_but_the_newest_call_is_packed() -> None:
    row = filled("turbo4v4", 100, step=1, sinks=0, tail=0)

    stored = row.stored()

    assert (stored.packed_from, stored.packed_to) == (0, 99)


@given(
    cuts=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    sinks=st.sampled_from([0, 1, 4, 40]),
    tail=st.sampled_from([0, 32, 64]),
)
@settings(max_examples=40, deadline=None)
def test_how_tokens_arrive_does_not_change_what_is_packed(
    cuts: list[int], sinks: int, tail: int
) -> None:
    """Codes of a token depend on that token alone: any chunking packs the same tiles."""
    count = sum(cuts)
    keys, values = tokens(count)
    chunked = Row(parse_scheme("turbo8v3"), sink_tokens=sinks, tail_tokens=tail)
    start = 0
    for cut in cuts:
        chunked.append(keys[:, start : start + cut], values[:, start : start + cut])
        start += cut
    whole = Row(parse_scheme("turbo8v3"), sink_tokens=sinks, tail_tokens=tail)
    whole.append(keys, values)
    for row in (chunked, whole):
        row.pack()

    a, b = chunked.stored(), whole.stored()

    assert (a.length, a.packed_from, a.packed_to) == (b.length, b.packed_from, b.packed_to)
    if a.packed_to:
        assert mx.array_equal(a.tiles_in_use(), b.tiles_in_use())


@given(seed=st.integers(0, 10**6), trims=st.lists(st.integers(0, 70), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_trim_leaves_a_row_that_goes_on_exactly(seed: int, trims: list[int]) -> None:
    """After any trims and appends, attention is that of the tokens that are left, whatever of them is packed."""
    rng = np.random.default_rng(seed)
    keys, values = tokens(400, seed=seed)
    row = Row(parse_scheme("turbo8v8"), sink_tokens=4, tail_tokens=32)
    kept: list[int] = []
    at = 0
    for count in trims:
        grow = int(rng.integers(1, 60))
        row.append(keys[:, at : at + grow], values[:, at : at + grow])
        kept += range(at, at + grow)
        at += grow
        gone = row.trim(count)
        assert gone == min(count, len(kept))
        kept = kept[: len(kept) - gone]
    row.append(keys[:, at : at + 1], values[:, at : at + 1])
    kept.append(at)
    q = mx.random.normal((HEADS, 1, DIM_K), key=mx.random.key(seed))

    got = reference.attend(q, row.stored(), DIM_K**-0.5, None, None)

    index = mx.array(kept)
    expected = plain_attention(
        q, keys[:, index], values[:, index], packed=range(0), scheme=parse_scheme("fp16")
    )
    assert row.length == len(kept)
    assert mx.allclose(
        got, expected, atol=0.03
    )  # 8-bit vectors: two decimal digits of the output survive


def test_trim_of_more_than_there_is_empties_the_row() -> None:
    row = filled("turbo4v4", 100)

    assert row.trim(1000) == 100
    assert row.length == 0

    keys, values = tokens(50, seed=5)
    row.append(keys, values)
    assert row.stored().length == 50


@pytest.mark.parametrize("scheme", ["fp16", "int8", "turbo0v4", "turbo4v4"])
def test_a_copy_is_independent(scheme: str) -> None:
    row = filled(scheme, 100)
    other = copy.deepcopy(row)
    q = mx.random.normal((HEADS, 1, DIM_K), key=mx.random.key(1))
    before = reference.attend(q, row.stored(), 1.0, None, None)

    for fork, seed in ((other, 11), (row.copy(), 12)):
        keys, values = tokens(80, seed=seed)
        fork.append(keys, values)
        fork.trim(3)
    mx.eval(other.arrays)

    assert row.length == 100
    assert mx.array_equal(reference.attend(q, row.stored(), 1.0, None, None), before)


@pytest.mark.parametrize("scheme", PACKED)
def test_bytes_are_those_of_the_scheme(scheme: str) -> None:
    """Growth over whole tiles equals bits + one fp16 scale a vector, from the buffers' own sizes."""
    row = Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=32)
    used = []
    for seed in range(2):
        keys, values = tokens(512, seed=seed)
        row.append(keys.astype(mx.float16), values.astype(mx.float16))
        row.pack()
        used.append(row.used_bytes)
    mx.eval(row.arrays)

    kind = parse_scheme(scheme)
    assert used[1] - used[0] == 512 * HEADS * (
        kind.k.vector_bytes(DIM_K) + kind.v.vector_bytes(DIM_V)
    )
    assert row.nbytes >= row.used_bytes


@pytest.mark.parametrize("scheme", ["fp16", "int8", "turbo0v4", "turbo4v4"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("tail", [0, 32])
def test_memory_is_held_for_what_is_stored_and_for_nothing_else(
    scheme: str, heads: int, tail: int
) -> None:
    """A slice of an array keeps the whole array: sinks and tails once held chunks of hundreds of tokens."""
    before = mx.get_active_memory()
    row = Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=tail)

    for count in (2048, 512, 1, 1):
        keys, values = (mx.random.normal((heads, count, 64)) for _ in "kv")
        mx.eval(keys, values)
        row.append(keys, values)
        del keys, values
        for pack in (False, True):
            if pack:
                row.pack()
            mx.eval(row.arrays)
            held = mx.get_active_memory() - before
            assert held <= row.nbytes + 2**14, f"{held:,} bytes for {row.nbytes:,}"


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_output_has_the_queries_dtype(dtype: mx.Dtype) -> None:
    row = Row(parse_scheme("turbo8v4"), sink_tokens=4, tail_tokens=32)
    keys, values = tokens(100)
    row.append(keys.astype(dtype), values.astype(dtype))
    row.pack()
    for length in (1, 12):
        q = mx.random.normal((HEADS, length, DIM_K)).astype(dtype)

        assert reference.attend(q, row.stored(), 1.0, None, None).dtype == dtype


def test_learned_sinks_take_their_share_of_the_weights() -> None:
    row = filled("turbo8v8", 100)
    q = mx.random.normal((HEADS, 1, DIM_K), key=mx.random.key(2))
    without = reference.attend(q, row.stored(), 0.0, None, None)

    # with all scores 0, a sink of logit log(100) takes half of all weights
    with_sinks = reference.attend(
        q, row.stored(), 0.0, None, mx.full((HEADS,), float(np.log(100.0)))
    )

    assert mx.allclose(with_sinks, without / 2, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 12])
def test_a_mask_hides_tokens_wherever_they_are_stored(length: int) -> None:
    row = filled("turbo4v4", 120)
    q = mx.random.normal((HEADS, length, DIM_K), key=mx.random.key(4))
    seen = mx.arange(120)[None] == 50  # one packed token
    mask = mx.broadcast_to(seen, (length, 120))

    boolean = reference.attend(q, row.stored(), 1.0, mask, None)
    additive = reference.attend(q, row.stored(), 1.0, mx.where(mask, 0.0, -1e9), None)

    value = codec.reconstruct(
        *codec.encode(tokens(120)[1][:, 50:51], parse_scheme("turbo4v4").v, "v"),
        parse_scheme("turbo4v4").v,
        "v",
    )
    assert mx.allclose(boolean, mx.broadcast_to(value, boolean.shape), atol=1e-4)
    assert mx.allclose(additive, boolean, atol=1e-4)


def test_an_empty_row_cannot_be_attended_to() -> None:
    with pytest.raises(ValueError, match="empty row"):
        Row(parse_scheme("int8"), sink_tokens=4, tail_tokens=32).stored()


def exact_prompt_row() -> Row:
    return Row(parse_scheme("turbo3v3"), sink_tokens=4, tail_tokens=32, exact_prompt=256)


def test_a_short_prompt_is_attended_to_exactly_until_it_is_decoded() -> None:
    keys, values = tokens(202)
    row, exact = exact_prompt_row(), Row(SCHEMES["fp16"], sink_tokens=0, tail_tokens=0)
    queries = mx.random.normal((2 * HEADS, 100, DIM_K), key=mx.random.key(7))
    for start in (0, 100):
        for each in (row, exact):
            each.append(keys[:, start : start + 100], values[:, start : start + 100])
        assert row.packed_tokens == 0
        got, expected = (
            reference.attend(queries, each.stored(), 0.2, None, None) for each in (row, exact)
        )
        assert mx.array_equal(got, expected)

    for at in (200, 201):
        row.append(keys[:, at : at + 1], values[:, at : at + 1])

    assert row.packed_tokens == 160


def test_a_prompt_that_is_too_long_is_packed_while_it_is_read() -> None:
    keys, values = tokens(400)
    row = exact_prompt_row()
    for start in range(0, 400, 100):
        row.append(keys[:, start : start + 100], values[:, start : start + 100])

    assert row.packed_tokens == 160


def test_when_a_prompt_is_packed_does_not_change_what_it_is_packed_to() -> None:
    keys, values = tokens(201)
    rows = [exact_prompt_row(), Row(parse_scheme("turbo3v3"), sink_tokens=4, tail_tokens=32)]
    for row in rows:
        for start, end in ((0, 100), (100, 200), (200, 201)):
            row.append(keys[:, start:end], values[:, start:end])
        row.pack()

    first, second = (row.stored().tiles_in_use() for row in rows)

    assert mx.array_equal(first, second)


def test_an_exact_prompt_and_a_token_budget_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="packs its prompt"):
        Row(
            SCHEMES["int8"],
            sink_tokens=4,
            tail_tokens=32,
            exact_prompt=256,
            token_budget=256,
        )


def test_the_layers_of_a_model_do_not_all_grow_at_one_step() -> None:
    """Growing copies what is packed: for a moment there are two of it."""
    keys, values = tokens(2048)
    grown: list[set[int]] = []
    for place in range(4):
        row = Row(parse_scheme("turbo4v4"), sink_tokens=4, tail_tokens=32, place=place)
        row.append(keys, values)
        sizes: dict[int, int] = {}
        for fold in range(40):
            row.append(*(side[:, 32 * fold : 32 * fold + 32] for side in (keys, values)))
            assert row.tiles is not None
            sizes.setdefault(row.tiles.shape[1], fold)
        grown.append(set(sizes.values()) - {0, 1})

    assert all(grown)
    assert sum(map(len, grown)) == len(set.union(*grown))


def place_of(array: mx.array) -> int:
    address: int = np.array(array, copy=False).__array_interface__["data"][0]
    return address


def test_a_fold_writes_into_the_buffer_that_nobody_else_holds() -> None:
    keys, values = tokens(900)
    row = Row(parse_scheme("turbo4v4"), sink_tokens=4, tail_tokens=32)
    places: dict[int, list[int]] = {}
    for start in range(0, 900, 30):
        row.append(keys[:, start : start + 30], values[:, start : start + 30])
        mx.eval(row.arrays)
        if row.tiles is not None:
            places.setdefault(row.tiles.shape[1], []).append(place_of(row.tiles))

    assert max(map(len, places.values())) > 4
    assert all(len(set(seen)) == 1 for seen in places.values())


def test_a_decoded_token_is_written_into_the_tail_that_nobody_else_holds() -> None:
    keys, values = tokens(400)
    row = Row(parse_scheme("turbo4v4"), sink_tokens=4, tail_tokens=32)
    row.append(keys[:, :300], values[:, :300])
    places = []
    for at in range(300, 400):
        row.append(keys[:, at : at + 1], values[:, at : at + 1])
        mx.eval(row.arrays)
        places.append(place_of(row.arrays[-1]))

    moves = sum(one != other for one, other in pairwise(places))

    assert moves <= 4  # one for every 32 tokens
    tail = row.stored().v.tail
    assert tail is not None
    assert mx.array_equal(tail, values[:, 400 - tail.shape[1] :])
