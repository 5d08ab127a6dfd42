"""A policy through the scheduler that serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from daemon.cache import build
from daemon.measure import serving
from daemon.policy.architecture import LayerKind
from daemon.policy.resolved import LayerPlan
from daemon.policy.schemes import parse_scheme

TEXT = [(i * 131 + 7) % 499 for i in range(600)]


def factory(model: Any, scheme: str) -> build.CacheFactory:
    plan = LayerPlan(0, LayerKind.FULL, scheme, parse_scheme(scheme), sink_tokens=4, tail_tokens=32)
    return build.plan_caches(model, [plan, replace(plan, index=1)])


@pytest.mark.parametrize("scheme", ["fp16", "turbo8v4"])
def test_prompts_and_decoding_are_timed_apart_and_rows_are_as_if_alone(
    model: Any, scheme: str
) -> None:
    served = serving.serve(model, factory(model, scheme), "rows", TEXT)

    assert served.sequences == len(serving.PROMPTS)
    assert served.same_as_alone == served.sequences
    assert min(served.prompt_tps, served.decode_tps, served.batch_decode_tps) > 0


def test_a_batch_that_changes_tokens_is_told(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = serving._generate, []

    def disturbed(loaded: Any, prompts: Any) -> Any:
        calls.append(len(prompts))
        sequences, read_s, after_s = generate(loaded, prompts)
        if len(prompts) > 1:
            sequences[0].tokens[-1] += 1
        return sequences, read_s, after_s

    monkeypatch.setattr(serving, "_generate", disturbed)
    served = serving.serve(model, factory(model, "turbo8v4"), "rows", TEXT)

    assert calls == [1, 1, 1, 1, 4]
    assert served.same_as_alone == 3


def test_the_model_makes_its_own_caches_again_afterwards(model: Any) -> None:
    before = vars(model).get("make_cache")

    serving.serve(model, factory(model, "turbo8v4"), "alone", TEXT)

    assert vars(model).get("make_cache") is before
