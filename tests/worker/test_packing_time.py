"""The estimate of how long packing takes, on real rows and a scripted clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from daemon.cache.row import Row
from daemon.policy.schemes import SCHEMES
from daemon.worker.packing_time import RESAMPLE_S, PackingTime

SINKS, TAIL = 4, 32


def row(tokens: int) -> Row:
    made = Row(SCHEMES["turbo8v4"], sink_tokens=SINKS, tail_tokens=TAIL)
    made.append(*vectors(tokens))
    return made


def vectors(tokens: int) -> tuple[mx.array, mx.array]:
    mx.random.seed(tokens)
    return mx.random.normal((2, tokens, 64)), mx.random.normal((2, tokens, 64))


def clock(*moments: float) -> Callable[[], float]:
    """A clock that shows *moments* one after another."""
    left: Iterator[float] = iter(moments)
    return lambda: next(left)


def test_a_sample_packs_what_is_due_and_takes_that_time() -> None:
    layers = [[row(100)], [row(100)]]
    assert layers[0][0].due_tokens == 64 - SINKS
    time = PackingTime(clock(10.0, 10.25))
    time.sample(layers)

    assert time.seconds == 0.25
    assert [layer[0].due_tokens for layer in layers] == [0, 0]
    assert layers[1][0].packed_tokens == 64


def test_a_row_that_was_sampled_goes_on_as_one_that_was_not() -> None:
    sampled, plain = row(100), row(100)
    PackingTime(clock(0.0, 1.0)).sample([[sampled]])
    for each in (sampled, plain):
        each.append(*vectors(40))
        each.append(*vectors(1))
    ours, theirs = sampled.export(), plain.export()

    assert (ours.length, ours.packed_to) == (theirs.length, theirs.packed_to)
    assert ours.arrays.keys() == theirs.arrays.keys()
    for name, array in ours.arrays.items():
        assert np.array_equal(np.array(array), np.array(theirs.arrays[name]))


def test_what_is_not_timed_counts_as_timed_folds_of_about_its_size() -> None:
    time = PackingTime(clock(0.0, 6.0, 10.0, 20.0))
    time.sample([[row(100)]])  # 60 tokens: 0.1 s each
    time.sample([[row(1064)]])  # 1020 tokens: under 0.01 s each
    assert time.seconds == 16.0
    time.count(30)
    assert time.seconds == 16.0 + 30 * 0.1
    time.count(2000)
    assert time.seconds == 19.0 + 2000 * 10 / 1020


def test_a_slow_first_fold_is_no_measure_and_later_ones_are_averaged() -> None:
    late = 102.0 + RESAMPLE_S
    time = PackingTime(clock(0.0, 100.0, 100.0, 100.0, 102.0, late, late, late + 4.0))
    for _ in range(3):
        time.sample([[row(100)]])
    assert time.seconds == 106.0
    time.count(60)
    assert time.seconds == 106.0 + 3.0


def test_nothing_is_counted_before_something_was_timed() -> None:
    time = PackingTime(clock())
    time.count(32)
    time.sample([])
    time.sample([[row(20)]])  # nothing is due
    assert time.seconds == 0


def test_a_size_is_timed_twice_at_once_and_then_now_and_then() -> None:
    """The first time may have compiled a kernel."""
    late = 5.0 + RESAMPLE_S
    time = PackingTime(clock(0.0, 3.0, 4.0, 4.5, 5.0, 6.0, late, late, late + 1.0))
    time.sample([[row(100)]])
    time.sample([[row(100)]])
    assert time.seconds == 3.5
    kept = row(100)
    time.sample([[kept]])
    assert (time.seconds, kept.due_tokens) == (3.5, 60)
    time.sample([[kept]])
    assert (time.seconds, kept.due_tokens) == (4.5, 0)
