"""Every lever of the recipe for packing can be switched, and what a model answers changes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest

from daemon.cache import build, calibrate
from daemon.cache.build import CacheFactory
from daemon.cache.calibrate import KeyStatistics
from daemon.kernels import codebook, codec
from daemon.policy.architecture import LayerKind
from daemon.policy.resolved import LayerPlan
from daemon.policy.schemes import INT8, TURBO4, ScaleRule, Scheme

TOKENS = [(i * i * 31 + i * 7) % 997 for i in range(600)]
PROMPT = 300
RECIPE = LayerPlan(
    0, LayerKind.FULL, "turbo4v4", Scheme(TURBO4, TURBO4), sink_tokens=4, tail_tokens=32
)


@dataclass(frozen=True)
class Bench:
    """A model of Qwen2's kind with its statistics, and what it answers under the whole recipe."""

    model: Any
    statistics: dict[int, KeyStatistics]

    def answer(self, plan: LayerPlan = RECIPE, statistics: Any = None) -> mx.array:
        """Return the logits of some decode steps, with *plan* in all layers."""
        plans = [replace(plan, index=index) for index in range(len(self.model.layers))]
        return self.logits(build.plan_caches(self.model, plans), statistics)

    def logits(self, factory: CacheFactory, statistics: Any = None) -> mx.array:
        entries = self.statistics if statistics is None else statistics
        transforms = calibrate.attach(self.model, factory, entries)
        caches = factory.calibrated(transforms, "test")()
        for start in range(0, PROMPT, 100):
            self.model(mx.array([TOKENS[start : start + 100]]), cache=caches)
        steps = [
            self.model(mx.array([[token]]), cache=caches) for token in TOKENS[PROMPT : PROMPT + 6]
        ]
        out = mx.concatenate(steps, axis=1)
        mx.eval(out)
        return out


@pytest.fixture(scope="module", name="bench")
def _bench(biased: Any) -> Bench:
    factory = build.plan_caches(biased, [replace(RECIPE, index=index) for index in range(2)])
    return Bench(biased, calibrate.calibrate(biased, factory, [TOKENS]))


@pytest.fixture(scope="module", name="whole")
def _whole(bench: Bench) -> mx.array:
    return bench.answer()


def without_mean(bench: Bench) -> mx.array:
    return bench.answer(
        statistics={i: replace(it, mean=None) for i, it in bench.statistics.items()}
    )


def without_scale(bench: Bench) -> mx.array:
    ones = {i: replace(it, scale=mx.ones_like(it.scale)) for i, it in bench.statistics.items()}
    return bench.answer(statistics=ones)


def mean_that_does_not_rotate(bench: Bench) -> mx.array:
    still = {i: replace(it, constant=True) for i, it in bench.statistics.items()}
    return bench.answer(statistics=still)


def key_bias_of_the_checkpoint(bench: Bench) -> mx.array:
    plans = [replace(RECIPE, index=index) for index in range(2)]
    factory = build.plan_caches(bench.model, plans)
    return bench.logits(factory, calibrate.checkpoint_means(bench.model, factory, {0: 32, 1: 32}))


def with_rule(side: str, rule: ScaleRule) -> Callable[[Bench], mx.array]:
    scheme = replace(RECIPE.effective, **{side: replace(TURBO4, rule=rule)})
    return lambda bench: bench.answer(replace(RECIPE, effective=scheme))


def planned(**changes: Any) -> Callable[[Bench], mx.array]:
    return lambda bench: bench.answer(replace(RECIPE, **changes))


def boundary_values(bench: Bench) -> mx.array:
    first = replace(RECIPE, effective=Scheme(TURBO4, INT8))
    return bench.logits(build.plan_caches(bench.model, [first, replace(RECIPE, index=1)]))


LEVERS: dict[str, Callable[[Bench], mx.array]] = {
    "key mean": without_mean,
    "rotation of the mean": mean_that_does_not_rotate,
    "key scaling": without_scale,
    "calibration": lambda bench: bench.answer(statistics={}),
    "key bias as the mean": key_bias_of_the_checkpoint,
    **{
        f"{rule} scales of {side}": with_rule(side, rule)
        for rule in ("matched", "least squares", "raw")
        for side in ("k", "v")
    },
    "sinks": planned(sink_tokens=0),
    "tail": planned(tail_tokens=0),
    "fold": planned(fold_tokens=96),
    "boundary": boundary_values,
    "packing at the first decode step": planned(exact_prompt=2048),
    "token budget": planned(token_budget=160),
}


@pytest.mark.parametrize("lever", LEVERS)
def test_switching_a_lever_changes_the_answer(lever: str, bench: Bench, whole: mx.array) -> None:
    got = LEVERS[lever](bench)

    assert mx.all(mx.isfinite(got)).item()
    assert mx.max(mx.abs(got - whole)).item() > 1e-4


@pytest.fixture
def _coded_anew() -> Iterator[None]:
    """Let codecs forget what they made of a codebook, before and after."""
    codec._quantizer.cache_clear()
    yield
    codec._quantizer.cache_clear()


@pytest.mark.usefixtures("_coded_anew")
def test_the_codebook_of_the_head_dim_changes_the_answer(
    bench: Bench, whole: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of the exact density of 32 values, that of very many: a Gaussian."""
    exact = codebook.step
    monkeypatch.setattr(codebook, "step", lambda bits, dim: exact(bits, 4096))

    assert mx.max(mx.abs(bench.answer() - whole)).item() > 1e-4


def test_stretching_changes_the_answer(
    bench: Bench, whole: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "STRETCHES", (1.0,))

    assert mx.max(mx.abs(bench.answer() - whole)).item() > 1e-4


def test_nothing_switched_changes_nothing(bench: Bench, whole: mx.array) -> None:
    """Else the other tests would prove nothing."""
    assert mx.array_equal(bench.answer(), whole)
