"""Rows that take decode steps together: each is as if alone, whatever happens to it and to the others."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, generate_step

from daemon.cache import state
from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.kernels.attention import REFERENCE, Attention
from daemon.kernels.keys import KeyTransform
from daemon.policy.schemes import parse_scheme
from tests.kernels.fake_kernels import FakeKernels
from tests.kernels.fake_stepping import FakeStepping

HEADS, DIM = 2, 32
SCALE = DIM**-0.5


def stepping_attention(stepping: FakeStepping) -> Attention:
    return Attention("cuda", FakeKernels(), stepping=stepping)


def row(attention: Attention, scheme: str = "turbo8v4", **options: Any) -> Row:
    made = {"sink_tokens": 4, "tail_tokens": 32, **options}
    return Row(parse_scheme(scheme), attention=attention, **made)


def tokens(rows: int, count: int, seed: int) -> tuple[mx.array, mx.array]:
    made = mx.random.normal((2, rows, HEADS, count, DIM), key=mx.random.key(seed))
    return made[0], made[1]


class Pair:
    """A batch whose rows go together, and the same rows by themselves on the reference."""

    def __init__(self, stepping: FakeStepping, **options: Any) -> None:
        self.attention = stepping_attention(stepping)
        self.options = options
        self.batch = BatchCache([])
        self.alone: list[Row] = []
        self._seed = 0

    def extend(self, length: int) -> None:
        other = SequenceCache.merge([SequenceCache(row(self.attention, **self.options))])
        mine = row(REFERENCE, **self.options)
        for start in range(0, length, 20):
            keys, values = self._tokens(1, min(20, length - start))
            other.update_and_fetch(keys, values)
            mine.append(keys[0], values[0])
        self.batch.extend(other)
        self.alone.append(mine)

    def step(self) -> None:
        """One token a row; what each attends to is the same to the last bit."""
        self.take(1)
        queries = mx.random.normal((len(self.alone), 4, 1, DIM), key=mx.random.key(self._seed))
        got = self.batch.attend(queries, SCALE, None, None)
        for index, mine in enumerate(self.alone):
            want = SequenceCache(mine).attend(queries[index : index + 1], SCALE, None, None)
            assert mx.array_equal(got[index], want[0])

    def take(self, count: int) -> None:
        keys, values = self._tokens(len(self.alone), count)
        self.batch.update_and_fetch(keys, values)
        for mine, k, v in zip(self.alone, keys, values, strict=True):
            mine.append(k, v)

    def filter(self, keep: list[int]) -> None:
        self.batch.filter(keep)
        self.alone = [self.alone[index] for index in keep]

    def check(self) -> None:
        for index, mine in enumerate(self.alone):
            one, other = self.batch.extract(index).row.export(), mine.export()
            assert (one.length, one.packed_to) == (other.length, other.packed_to)
            assert one.arrays.keys() == other.arrays.keys()
            assert all(mx.array_equal(one.arrays[part], other.arrays[part]) for part in one.arrays)
        assert self.batch.offset.tolist() == [mine.length for mine in self.alone]
        assert self.batch.size() == max(mine.length for mine in self.alone)

    def _tokens(self, rows: int, count: int) -> tuple[mx.array, mx.array]:
        self._seed += 1
        return tokens(rows, count, self._seed)


OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(20, 70)),
    st.tuples(st.just("take"), st.integers(1, 40)),
    st.tuples(st.just("filter"), st.integers(0, 10**6)),
    st.tuples(st.just("extend"), st.integers(1, 170)),
    st.tuples(st.just("trim"), st.sampled_from([1, 3, 40])),
    st.tuples(st.just("pack"), st.just(0)),
    st.tuples(st.just("copy"), st.just(0)),
    st.tuples(st.just("extract and merge"), st.just(0)),
    st.tuples(st.just("save and restore"), st.just(0)),
)


@given(
    operations=st.lists(OPERATIONS, min_size=1, max_size=8),
    sizes=st.sampled_from([(4, 32, 32), (0, 32, 32), (40, 64, 64)]),
)
@settings(max_examples=40)
def test_any_history_of_rows_that_go_together_leaves_each_as_if_alone(
    operations: list[tuple[str, int]],
    sizes: tuple[int, int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "joined.safetensors"
    sinks, tail, fold = sizes
    options = {"sink_tokens": sinks, "tail_tokens": tail, "fold_tokens": fold}
    pair = Pair(FakeStepping(), **options)

    def through_a_file(cache: SequenceCache) -> SequenceCache:
        identity = state.Identity("model", "policy", tuple(range(cache.offset)))
        state.save(path, [cache], identity)
        empty = [SequenceCache(row(pair.attention, **options))]
        (restored,) = state.restore(path, empty, identity)
        return restored

    for name, number in [("extend", 40), ("step", 2), *operations, ("step", 1)]:
        rows = range(len(pair.alone))
        match name:
            case "extend":
                pair.extend(number)
            case "step":
                for _ in range(number):
                    pair.step()
            case "take":
                pair.take(number)
            case "filter":
                pair.filter([index for index in rows if (number >> index) & 1] or [0])
            case "trim":
                pair.batch.trim(number)
                for mine in pair.alone:
                    mine.trim(number)
            case "pack":
                pair.batch.pack()
                for mine in pair.alone:
                    mine.pack()
            case "copy":
                before, pair.batch = pair.batch, copy.deepcopy(pair.batch)
                before.update_and_fetch(*tokens(len(rows), 1, 10**6))
            case "extract and merge":
                pair.batch = SequenceCache.merge([pair.batch.extract(i) for i in rows])
            case "save and restore":
                taken = [through_a_file(pair.batch.extract(i)) for i in rows]
                pair.batch = SequenceCache.merge(taken)
        pair.check()


def test_a_step_is_one_call_for_all_rows_and_a_fold_another() -> None:
    stepping = FakeStepping()
    pair = Pair(stepping)
    for length in (300, 40, 300, 7):
        pair.extend(length)
    pair.step()
    stepping.calls.clear()
    stepping.folds.clear()

    for _ in range(64):
        pair.step()

    assert stepping.calls == [4] * 64
    assert sorted(stepping.folds) == [
        1,
        1,
        1,
        2,
        2,
    ]  # two of each but the shortest, equal ones at once
    pair.check()


def test_one_sequence_goes_the_same_way(tiny_llama: Any, make_caches: Any) -> None:
    stepping = FakeStepping()
    attention = stepping_attention(stepping)

    def generated(caches: list[SequenceCache]) -> list[int]:
        steps = generate_step(mx.arange(90), tiny_llama, max_tokens=50, prompt_cache=caches)
        return [int(token) for token, _ in steps]

    assert generated(make_caches("turbo8v4", attention=attention)) == generated(
        make_caches("turbo8v4")
    )
    assert set(stepping.calls[3:]) == {1}
    assert len(stepping.calls) > 4 * 45


def test_a_served_batch_gives_the_tokens_of_its_rows_alone(
    tiny_llama: Any, make_caches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two waves of admission through mlx-lm's own generator."""
    stepping = FakeStepping()
    attention = stepping_attention(stepping)
    prompts = [[(7 * i + j) % 97 for j in range(n)] for i, n in enumerate((5, 120, 61, 33))]
    counts = (4, 60, 37, 50)

    def alone(prompt: list[int], count: int) -> list[int]:
        caches = make_caches("turbo8v4")
        steps = generate_step(mx.array(prompt), tiny_llama, max_tokens=count, prompt_cache=caches)
        return [int(token) for token, _ in steps]

    monkeypatch.setattr(
        tiny_llama,
        "make_cache",
        lambda: make_caches("turbo8v4", attention=attention),
        raising=False,
    )
    generator = BatchGenerator(tiny_llama, stream=mx.default_stream(mx.default_device()))
    got: dict[int, list[int]] = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            for response in generator.next()[1]:
                got.setdefault(response.uid, []).append(response.token)

    uids = generator.insert(prompts[:2], max_tokens=list(counts[:2]))
    run(20)
    uids += generator.insert(prompts[2:], max_tokens=list(counts[2:]))
    run(90)

    expected = [alone(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert [got[uid] for uid in uids] == expected
    assert {2, 3} <= set(stepping.calls)


@pytest.mark.parametrize(
    "options",
    [
        {"tail_tokens": 0},
        {"token_budget": 128},
        {"scheme": "fp16"},
    ],
    ids=str,
)
def test_rows_that_cannot_go_together_go_one_by_one(options: dict[str, Any]) -> None:
    stepping = FakeStepping()
    pair = Pair(stepping, **options)
    for length in (90, 200):
        pair.extend(length)

    for _ in range(3):
        pair.step()

    assert stepping.calls == []
    pair.check()


def test_more_rows_than_the_kernel_has_room_for_go_one_by_one() -> None:
    stepping = FakeStepping(most=2)
    pair = Pair(stepping)
    for length in (90, 200, 50):
        pair.extend(length)

    pair.step()
    assert stepping.calls.count(3) == 0
    pair.filter([0, 2])
    pair.step()

    assert stepping.calls[-1] == 2


def test_rows_with_another_transform_of_keys_go_one_by_one() -> None:
    stepping = FakeStepping()
    attention = stepping_attention(stepping)
    rows = []
    for seed in (1, 2):
        scale = mx.exp(mx.random.normal((HEADS, DIM), key=mx.random.key(seed)))
        rows.append(row(attention, keys=KeyTransform(scale, None, None), statistics_id="s"))
        rows[-1].append(*(side[0] for side in tokens(1, 90, seed)))
    batch = BatchCache(rows)
    batch.update_and_fetch(*tokens(2, 1, 3))

    batch.attend(mx.zeros((2, 4, 1, DIM)), SCALE, None, None)

    assert stepping.calls == []


def test_a_mask_or_another_query_than_one_token_is_answered_row_by_row() -> None:
    pair = Pair(FakeStepping())
    for length in (90, 200):
        pair.extend(length)
    pair.step()
    pair.take(3)
    queries = mx.random.normal((2, 4, 3, DIM), key=mx.random.key(1))

    got = pair.batch.attend(queries, SCALE, "causal", None)

    for index, mine in enumerate(pair.alone):
        want = SequenceCache(mine).attend(queries[index : index + 1], SCALE, None, None)
        assert mx.array_equal(got[index], want[0])
    pair.take(1)
    mask = mx.ones((2, 1, 1, pair.batch.size()), dtype=mx.bool_)
    got = pair.batch.attend(queries[:, :, :1], SCALE, mask, None)
    for index, mine in enumerate(pair.alone):
        want = SequenceCache(mine).attend(queries[index : index + 1, :, :1], SCALE, None, None)
        assert mx.allclose(got[index], want[0], atol=1e-5)
    pair.step()
    pair.check()


def test_a_second_attention_on_the_same_tokens_sees_the_same() -> None:
    """As in a layer that reads another one's cache."""
    pair = Pair(FakeStepping())
    pair.extend(100)
    for _ in range(40):
        pair.step()
        queries = mx.random.normal((1, 4, 1, DIM), key=mx.random.key(5))
        got = pair.batch.attend(queries, SCALE, None, None)
        want = SequenceCache(pair.alone[0]).attend(queries, SCALE, None, None)
        assert mx.array_equal(got, want)
    pair.check()


def test_tokens_of_the_tail_are_forgotten_without_parting() -> None:
    """As a draft model's are, once a round of speculation."""
    stepping = FakeStepping()
    pair = Pair(stepping)
    for length in (90, 200):
        pair.extend(length)
    for _ in range(30):
        for _ in range(4):
            pair.step()
        seen = list(stepping.calls)
        assert pair.batch.trim(3) == 3
        for mine in pair.alone:
            mine.trim(3)
        pair.step()
        assert stepping.calls == [*seen, 2]
        pair.check()


def test_bytes_are_counted_once() -> None:
    pair = Pair(FakeStepping())
    for length in (90, 200):
        pair.extend(length)
    pair.step()

    held = {id(array): array.nbytes for array in pair.batch.state}

    assert pair.batch.nbytes == sum(held.values())


def test_a_batch_that_nobody_holds_is_freed_at_once() -> None:
    """Not when Python's collector of cycles gets to it: tiles can be gigabytes."""
    pair = Pair(FakeStepping())
    pair.extend(200)
    pair.step()
    gone = weakref.ref(pair.batch.rows[0])
    gc.disable()
    try:
        pair.batch = BatchCache([])
        assert gone() is None
    finally:
        gc.enable()


def test_a_row_taken_out_of_a_batch_does_not_keep_the_others_in_memory() -> None:
    pair = Pair(FakeStepping())
    pair.extend(10)
    pair.step()  # what is made once for the process
    del pair
    gc.collect()
    before = mx.get_active_memory()
    pair = Pair(FakeStepping())
    for _ in range(8):
        pair.extend(400)
    pair.step()
    mx.eval(pair.batch.state)
    taken = pair.batch.extract(3)
    mx.eval(taken.state)
    del pair
    gc.collect()

    assert taken.offset == 401
    assert mx.get_active_memory() - before < 2 * taken.nbytes
