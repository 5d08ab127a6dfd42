from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.worker.requests import Sampling
from daemon.worker.sampling import make_logits_processors, make_sampler, restrict

VOCAB = 50


def logits(seed: int = 0) -> mx.array:
    return mx.random.normal((1, VOCAB), key=mx.random.key(seed)) * 3


def kept(sampling: Sampling, x: mx.array) -> set[int]:
    return {
        index
        for index, value in enumerate(restrict(x, sampling)[0].tolist())
        if value > float("-inf")
    }


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert make_sampler(Sampling(temperature=0))(logits()).tolist() == [
        int(mx.argmax(logits()).item())
    ]


def test_all_greedy_requests_share_one_sampler() -> None:
    """mlx-lm samples a batch in one call only when the samplers are the same object."""
    assert make_sampler(Sampling(temperature=0)) is make_sampler(Sampling(temperature=0, seed=3))


def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside() -> None:
    alone = [make_sampler(Sampling(seed=5))(logits(i)).item() for i in range(1)]
    first, neighbour, second = (
        make_sampler(Sampling(seed=5)),
        make_sampler(Sampling()),
        make_sampler(Sampling(seed=5)),
    )
    tokens: tuple[list[object], list[object]] = ([], [])
    for step in range(20):
        tokens[0].append(first(logits(step)).item())
        neighbour(logits(step))
        mx.random.uniform()
        tokens[1].append(second(logits(step)).item())

    assert tokens[0] == tokens[1]
    assert tokens[0][:1] == alone


def test_seeds_and_their_absence_give_different_tokens() -> None:
    def run(seed: int | None) -> list[object]:
        sampler = make_sampler(Sampling(seed=seed))
        return [sampler(mx.zeros((1, VOCAB))).item() for _ in range(30)]

    runs = [run(1), run(2), run(3), run(None), run(None)]

    assert len({tuple(tokens) for tokens in runs}) == 5


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, 2**64 + 5, -7])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= int(make_sampler(Sampling(seed=seed))(logits()).item()) < VOCAB


@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_restrictions_always_leave_the_best_token(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    x = logits(seed)

    left = kept(Sampling(top_k=top_k, top_p=top_p, min_p=min_p), x)

    assert int(mx.argmax(x).item()) in left


def test_top_k_keeps_the_k_likeliest() -> None:
    best = mx.argsort(-logits())[0, :7].tolist()

    assert kept(Sampling(top_k=7), logits()) == set(best)  # type: ignore[arg-type]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    x = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))

    assert kept(Sampling(top_p=0.4), x) == {0}
    assert kept(Sampling(top_p=0.79), x) == {0, 1}
    assert kept(Sampling(top_p=0.81), x) == {0, 1, 2}


def test_min_p_keeps_what_is_within_a_share_of_the_best() -> None:
    x = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))

    assert kept(Sampling(min_p=0.25), x) == {0, 1, 2}


def run(sampling: Sampling, tokens: list[int], x: mx.array, prompt_tokens: int) -> mx.array:
    for process in make_logits_processors(sampling, prompt_tokens):
        x = process(mx.array(tokens), x)
    return x


def test_no_penalties_are_no_processors() -> None:
    assert make_logits_processors(Sampling(), 3) == []


def test_repetition_penalty_counts_prompt_and_output_once_each() -> None:
    x = mx.array([[2.0, -2.0, 4.0, 1.0]])

    got = run(Sampling(repetition_penalty=2.0), [0, 1, 0, 0], x, prompt_tokens=2)

    assert got.tolist() == [[1.0, -4.0, 4.0, 1.0]]
    assert x.tolist() == [[2.0, -2.0, 4.0, 1.0]]


def test_presence_and_frequency_count_the_output_only() -> None:
    got = run(
        Sampling(presence_penalty=1.0, frequency_penalty=0.5),
        [3, 3, 0, 0, 1],
        mx.zeros((1, 4)),
        prompt_tokens=2,
    )

    assert got.tolist() == [[-2.0, -1.5, 0.0, 0.0]]


def test_logit_bias_adds() -> None:
    got = run(Sampling(logit_bias=((2, 5.0), (0, -100.0))), [1], mx.zeros((1, 4)), prompt_tokens=1)

    assert got.tolist() == [[-100.0, 0.0, 5.0, 0.0]]
