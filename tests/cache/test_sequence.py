from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from daemon.cache import state
from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache, View
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.policy.schemes import parse_scheme
from tests.tiny_llama import tiny_llama as made_llama

SCHEMES = ("fp16", "int8", "turbo0v4", "turbo8v3", "turbo4v4", "turbo5v3.5", "turbo4v3t", "affine4")
PROMPTS = [[(7 * i + j) % 997 for j in range(n)] for i, n in enumerate((5, 120, 61, 33))]


@pytest.fixture(scope="module", name="tiny_llama")
def _tiny_llama() -> Any:
    """Two layers are enough to mix their caches up."""
    return made_llama(7, num_hidden_layers=2)


def solo(model: Any, caches: list[Any], prompt: list[int], count: int = 12) -> list[int]:
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=caches, prefill_step_size=32
    )
    return [int(token) for token, _ in steps]


def test_greedy_tokens_of_the_fp16_scheme_equal_mlx_lms(tiny_llama: Any, make_caches: Any) -> None:
    for prompt in PROMPTS:
        expected = solo(tiny_llama, make_prompt_cache(tiny_llama), prompt)

        assert solo(tiny_llama, make_caches("fp16"), prompt) == expected


@pytest.mark.parametrize("options", [{}, {"tail_tokens": 0, "token_budget": 96}])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_batch_row_equals_its_solo_run(
    tiny_llama: Any,
    make_caches: Any,
    scheme: str,
    options: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two waves of admission, ragged prompts, rows that end at different times, with and without a token budget."""

    def caches() -> list[Any]:
        made: list[Any] = make_caches(scheme, **options)
        return made

    monkeypatch.setattr(tiny_llama, "make_cache", caches, raising=False)
    expected = [
        solo(tiny_llama, caches(), prompt, count)
        for prompt, count in zip(PROMPTS, (4, 12, 7, 9), strict=True)
    ]
    generator = BatchGenerator(
        tiny_llama, prefill_step_size=32, stream=mx.default_stream(mx.default_device())
    )
    got: dict[int, list[int]] = {}

    uids = generator.insert(PROMPTS[:2], max_tokens=[4, 12])
    for _ in range(4):
        collect(generator, got)
    uids += generator.insert(PROMPTS[2:], max_tokens=[7, 9])
    for _ in range(30):
        collect(generator, got)

    assert [got[uid] for uid in uids] == expected


def collect(generator: Any, got: dict[int, list[int]]) -> None:
    for response in generator.next()[1]:
        got.setdefault(response.uid, []).append(response.token)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_finished_row_is_extracted_as_the_same_kind_of_cache(
    tiny_llama: Any, make_caches: Any, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inherited merge or extract would silently return mlx-lm's own fp16 cache."""
    monkeypatch.setattr(tiny_llama, "make_cache", lambda: make_caches(scheme), raising=False)
    generator = BatchGenerator(
        tiny_llama, prefill_step_size=32, stream=mx.default_stream(mx.default_device())
    )
    generator.insert([PROMPTS[1]], max_tokens=[5])
    finished = None
    while finished is None:
        finished = next((r.prompt_cache for r in generator.next()[1] if r.finish_reason), None)

    assert all(type(cache) is SequenceCache for cache in finished)
    assert {cache.row.scheme.name for cache in finished} == {scheme}
    # mlx-lm computes one step ahead: the last token is already in the cache
    assert finished[0].offset == len(PROMPTS[1]) + 5
    alone = make_caches(scheme)
    solo(tiny_llama, alone, PROMPTS[1], 5)
    assert finished[0].row.stored().packed_to == alone[0].row.stored().packed_to


@pytest.mark.parametrize("scheme", ["int8", "turbo4v4"])
def test_chunked_prefill_with_padding_stores_no_padding(
    tiny_llama: Any, make_caches: Any, scheme: str
) -> None:
    rows = [make_caches(scheme) for _ in PROMPTS]
    batch = [SequenceCache.merge([row[layer] for row in rows]) for layer in range(len(rows[0]))]
    longest = max(map(len, PROMPTS))
    padding = [longest - len(prompt) for prompt in PROMPTS]
    tokens = mx.array([prompt + [0] * pad for prompt, pad in zip(PROMPTS, padding, strict=True)])
    for cache in batch:
        cache.prepare(lengths=[len(prompt) for prompt in PROMPTS], right_padding=padding)

    logits = mx.concatenate(
        [tiny_llama(tokens[:, start : start + 50], cache=batch) for start in range(0, longest, 50)],
        axis=1,
    )
    for cache in batch:
        cache.finalize()

    assert batch[0].offset.tolist() == [len(prompt) for prompt in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        alone = make_caches(scheme)
        expected = mx.concatenate(
            [
                tiny_llama(mx.array([prompt[start : start + 50]]), cache=alone)
                for start in range(0, len(prompt), 50)
            ],
            axis=1,
        )
        assert mx.allclose(logits[index, : len(prompt)], expected[0], atol=1e-4)


@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("decode"), st.integers(1, 60)),
            st.tuples(st.just("filter"), st.integers(0, 10**6)),
            st.tuples(st.just("extend"), st.integers(1, 170)),
            st.tuples(st.just("trim"), st.integers(1, 40)),
            st.tuples(st.just("copy"), st.just(0)),
            st.tuples(st.just("extract and merge"), st.just(0)),
            st.tuples(st.just("save and restore"), st.just(0)),
        ),
        min_size=1,
        max_size=8,
    ),
    scheme=st.sampled_from(["turbo8v4", "turbo4v4", "turbo3.5v2", "turbo0v3", "affine4", "fp16"]),
    window=st.sampled_from(
        [
            {"sink_tokens": 4, "tail_tokens": 32},
            {"sink_tokens": 4, "tail_tokens": 32, "token_budget": 128},
            {"sink_tokens": 0, "tail_tokens": 0},
            {"sink_tokens": 40, "tail_tokens": 64, "fold_tokens": 64},
        ]
    ),
    calibrated=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_history_of_a_batch_leaves_each_row_as_if_alone(
    operations: list[tuple[str, int]],
    scheme: str,
    window: dict[str, int],
    calibrated: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Rows carry their own tokens through filter, extend, extract, merge, trim, deepcopy and a file."""
    source = iter(range(10**6))
    path = tmp_path_factory.getbasetemp() / "history.safetensors"
    batch = BatchCache([])
    mirror: list[Row] = []

    keys = KeyTransform(mx.full((2, 32), 2.0), mx.full((2, 32), 0.5), Rotary(nn.RoPE(32), 32))
    statistics = {"keys": keys, "statistics_id": "measured"} if calibrated else {}

    def fresh() -> Row:
        return Row(parse_scheme(scheme), **window, **statistics)

    def grow(cache: BatchCache, rows: list[Row], count: int) -> None:
        for _ in range(-(-count // 20)):
            step = min(20, count)
            keys = mx.random.normal((len(rows), 2, step, 32), key=mx.random.key(next(source)))
            cache.update_and_fetch(keys, keys)
            for row, k in zip(rows, keys, strict=True):
                row.append(k, k)

    def through_a_file(cache: SequenceCache) -> SequenceCache:
        identity = state.Identity("model", "policy", tuple(range(cache.offset)))
        state.save(path, [cache], identity)
        (restored,) = state.restore(path, [SequenceCache(fresh())], identity)
        return restored

    for name, number in [("extend", 40), *operations]:
        if name == "extend":
            rows = [fresh()]
            other = SequenceCache.merge([SequenceCache(fresh())])
            grow(other, rows, number)
            batch.extend(other)
            mirror += rows
        elif name == "decode" and mirror:
            grow(batch, mirror, number)
        elif name == "filter" and len(mirror) > 1:
            keep = [index for index in range(len(mirror)) if (number >> index) & 1] or [0]
            batch.filter(keep)
            mirror = [mirror[index] for index in keep]
        elif name == "trim" and batch.is_trimmable():
            batch.trim(number)
            for row in mirror:
                row.trim(number)
        elif name == "copy":
            batch = copy.deepcopy(batch)
        elif name == "extract and merge":
            batch = SequenceCache.merge([batch.extract(i) for i in range(len(mirror))])
        elif name == "save and restore":
            taken = [through_a_file(batch.extract(i)) for i in range(len(mirror))]
            batch = SequenceCache.merge(taken)

    q = mx.random.normal((len(mirror), 4, 1, 32), key=mx.random.key(1))
    attended = batch.attend(q, 1.0, None, None) if min(r.length for r in mirror) else None
    for index, row in enumerate(mirror):
        mine, alone = batch.extract(index).row.export(), row.export()
        assert (mine.length, mine.dropped, mine.packed_to) == (
            alone.length,
            alone.dropped,
            alone.packed_to,
        )
        assert mine.arrays.keys() == alone.arrays.keys()
        assert all(mx.array_equal(mine.arrays[part], alone.arrays[part]) for part in mine.arrays)
        if attended is not None:
            expected = SequenceCache(row).attend(q[index : index + 1], 1.0, None, None)
            assert mx.array_equal(attended[index], expected[0])


def test_extract_is_not_disturbed_by_what_the_batch_does_next(
    tiny_llama: Any, make_caches: Any
) -> None:
    caches = [make_caches("turbo8v4") for _ in range(2)]
    batch = [SequenceCache.merge([row[layer] for row in caches]) for layer in range(len(caches[0]))]
    tiny_llama(mx.array([PROMPTS[1][:80], PROMPTS[1][20:100]]), cache=batch)
    taken = batch[0].extract(1)
    before = [mx.array(array) for array in taken.row.arrays]

    for token in range(40):
        tiny_llama(mx.array([[token], [token]]), cache=batch)
    batch[0].trim(10)

    assert taken.offset == 80
    assert all(mx.array_equal(a, b) for a, b in zip(taken.row.arrays, before, strict=True))


def test_rows_are_not_padded_to_the_longest() -> None:
    """A long row beside a short one costs what the two cost alone; mlx-lm's own batch cache pads."""
    rows = []
    for count in (2000, 10):
        row = Row(parse_scheme("turbo4v4"), sink_tokens=4, tail_tokens=32)
        row.append(mx.zeros((2, count, 64)), mx.zeros((2, count, 64)))
        rows.append(row)

    assert SequenceCache.merge([SequenceCache(row) for row in rows]).nbytes == sum(
        row.nbytes for row in rows
    )


def test_caches_have_nothing_that_mlx_lm_would_mistake() -> None:
    """`bits` selects mlx-lm's own quantized path; a falsy cache loses its mask; MLX objects cannot be deep-copied."""
    for cache in (
        SequenceCache(Row(parse_scheme("int8"), sink_tokens=4, tail_tokens=32)),
        BatchCache([]),
    ):
        assert not hasattr(cache, "bits")
        assert not hasattr(cache, "to_quantized")
        assert not hasattr(type(cache), "__len__")
        assert not hasattr(type(cache), "__bool__")


def test_views_have_a_shape_and_no_numbers() -> None:
    cache = SequenceCache(Row(parse_scheme("turbo8v4"), sink_tokens=4, tail_tokens=32))

    keys, values = cache.update_and_fetch(
        mx.zeros((1, 2, 7, 32), mx.bfloat16), mx.zeros((1, 2, 7, 64), mx.bfloat16)
    )

    assert isinstance(keys, View)
    assert (keys.shape, values.shape) == ((1, 2, 7, 32), (1, 2, 7, 64))
    assert keys.dtype == mx.bfloat16
    with pytest.raises(TypeError, match="only be attended to"):
        list(keys)
    with pytest.raises(AttributeError):
        keys.astype(mx.float32)  # type: ignore[attr-defined] # what a model that converts keys would do


def test_windows_become_masks(tiny_llama: Any) -> None:
    """A model that asks a full cache for a window gets one, alone and in a batch."""
    single = SequenceCache(Row(parse_scheme("int8"), sink_tokens=4, tail_tokens=32))
    single.update_and_fetch(mx.zeros((1, 2, 10, 32)), mx.zeros((1, 2, 10, 32)))

    assert single.make_mask(1) is None
    assert single.make_mask(3) == "causal"
    assert single.make_mask(1, window_size=64) is None
    window = single.make_mask(1, window_size=4)
    assert isinstance(window, mx.array)
    assert window.tolist() == [[False] * 7 + [True] * 4]
    both = SequenceCache.merge(
        [single, SequenceCache(Row(parse_scheme("int8"), sink_tokens=4, tail_tokens=32))]
    )
    mask = both.make_mask(2, return_array=True)
    assert isinstance(mask, mx.array)
    assert mask.shape == (2, 1, 2, 12)
    assert mask[1, 0].tolist() == [[False] * 10 + [True, False], [False] * 10 + [True, True]]


@pytest.mark.parametrize("lengths", [(50, 20), (0, 40), (7, 7)])
@pytest.mark.parametrize("chunks", [(1, 30), (30, 1), (4, 4)])
def test_a_mask_is_as_wide_as_the_keys_that_come_with_it(
    lengths: tuple[int, int], chunks: tuple[int, int]
) -> None:
    """Also where the row with the longest history gets the fewest new tokens."""
    rows = []
    for length in lengths:
        row = Row(parse_scheme("turbo8v4"), sink_tokens=4, tail_tokens=32)
        if length:
            row.append(mx.zeros((2, length, 32)), mx.zeros((2, length, 16)))
        rows.append(SequenceCache(row))
    batch = SequenceCache.merge(rows)
    n = max(chunks)
    batch.prepare(lengths=list(chunks), right_padding=[n - count for count in chunks])
    mask = batch.make_mask(n, return_array=True)
    assert isinstance(mask, mx.array)

    keys, values = batch.update_and_fetch(mx.zeros((2, 2, n, 32)), mx.zeros((2, 2, n, 16)))

    assert keys.shape == (2, 2, mask.shape[-1], 32)
    assert values.shape == (2, 2, mask.shape[-1], 16)
    batch.finalize()
    batch.trim(1)
    step = batch.make_mask(1, return_array=True)
    assert isinstance(step, mx.array)
    keys, _ = batch.update_and_fetch(mx.zeros((2, 2, 1, 32)), mx.zeros((2, 2, 1, 16)))
    assert keys.shape[2] == step.shape[-1]


@pytest.mark.parametrize("scheme", ["fp16", "turbo8v4"])
@pytest.mark.parametrize("per_head", [False, True])
def test_masks_of_two_rows_serve_many_query_heads(scheme: str, per_head: bool) -> None:
    """40 query heads on 8 KV heads, with one mask for all heads and with one for each."""
    batch = SequenceCache.merge(
        [SequenceCache(Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=32)) for _ in range(2)]
    )
    keys, values = (mx.random.normal((2, 8, 90, 16), key=mx.random.key(i)) for i in (1, 2))
    batch.update_and_fetch(keys, values)
    new = mx.random.normal((2, 8, 5, 16), key=mx.random.key(3))
    batch.update_and_fetch(new, new)
    queries = mx.random.normal((2, 40, 5, 16), key=mx.random.key(4))
    shape = (2, 40 if per_head else 1, 5, 95)
    mask = mx.random.bernoulli(0.5, shape, key=mx.random.key(5)) | (mx.arange(95) == 0)

    got = batch.attend(queries, 0.25, mask, None)

    joined = [mx.concatenate([old, new], axis=2) for old in (keys, values)]
    expected = mx.fast.scaled_dot_product_attention(queries, *joined, scale=0.25, mask=mask)
    assert mx.allclose(got, expected, atol=1e-5 if scheme == "fp16" else 0.4)


def test_batch_masks_are_cut_to_each_row() -> None:
    """A rectangular mask with left padding gives each row what it would see alone."""
    rows = []
    for seed, count in ((1, 50), (2, 20)):
        row = Row(parse_scheme("int8"), sink_tokens=4, tail_tokens=32)
        keys = mx.random.normal((2, count, 32), key=mx.random.key(seed))
        row.append(keys, keys)
        rows.append(row)
    batch = SequenceCache.merge([SequenceCache(row.copy()) for row in rows])
    mask = batch.make_mask(3, return_array=True)
    new = mx.random.normal((2, 2, 3, 32), key=mx.random.key(3))
    queries = mx.random.normal((2, 4, 3, 32), key=mx.random.key(4))

    batch.update_and_fetch(new, new)
    got = batch.attend(queries, 1.0, mask, None)

    for index, row in enumerate(rows):
        alone = SequenceCache(row)
        alone.update_and_fetch(new[index : index + 1], new[index : index + 1])
        assert mx.allclose(
            got[index], alone.attend(queries[index : index + 1], 1.0, "causal", None)[0], atol=1e-5
        )
