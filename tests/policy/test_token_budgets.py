from __future__ import annotations

from collections.abc import Callable

import pytest

from daemon.errors import PolicyError
from daemon.policy.architecture import Architecture
from daemon.policy.budget import kv_bytes, kv_cost
from daemon.policy.matching import check_rules, least_token_budget
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.spec import LayerRule
from daemon.policy.token_budgets import layers_text

Plain = Callable[..., Architecture]
Resolved = Callable[..., ResolvedPolicy]


def test_a_budget_is_said_in_reason_warnings_and_summary(resolved: Resolved, plain: Plain) -> None:
    rules = (LayerRule(match="2-3", token_budget=8192), LayerRule(match=[3], mode="fp16"))

    policy = resolved(plain("ffff"), layers=rules)

    assert [plan.token_budget for plan in policy.layers] == [None, None, 8192, 8192]
    assert [plan.reason for plan in policy.layers[1:]] == [
        None,
        *["keeps 8,192 tokens (lossy)"] * 2,
    ]
    assert policy.warnings == (
        "layers 2-3: a token budget of 8,192 keeps the first 4 tokens and the newest ones and drops those"
        " between (lossy)",
    )
    assert policy.summary == "turbo8v4 on 3 of 4 layers; 1 full fp16; 2 keep 8,192 tokens"


def test_layers_in_full_precision_keep_their_sinks_where_they_have_a_budget(
    resolved: Resolved, plain: Plain
) -> None:
    rules = (LayerRule(match=[1], token_budget=128),)

    policy = resolved(plain("ff"), mode="fp16", layers=rules)

    assert [(p.sink_tokens, p.tail_tokens) for p in policy.layers] == [(0, 0), (4, 0)]
    assert policy.summary == "fp16 on 2 of 2 layers; 1 keeps 128 tokens"


def test_a_window_that_is_short_enough_keeps_the_promise_by_itself(
    resolved: Resolved, plain: Plain
) -> None:
    policy = resolved(plain("sf"), layers=(LayerRule(match="all", token_budget=128),), strict=False)

    assert [plan.token_budget for plan in policy.layers] == [None, 128]
    assert not any("no token_budget" in warning for warning in policy.warnings)


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ("sf", "layer 0: no token_budget, the window is 128 tokens"),
        ("ll", "layers 0-1: no token_budget, latent attention (MLA) needs every token"),
    ],
)
def test_a_layer_that_cannot_drop_tokens_says_why_and_strict_refuses(
    kinds: str, why: str, resolved: Resolved, plain: Plain
) -> None:
    rules = (LayerRule(match="all", mode="fp16", token_budget=96, sink_tokens=0, tail_tokens=32),)

    assert why in resolved(plain(kinds), layers=rules).warnings
    with pytest.raises(PolicyError, match="cannot have a token budget") as caught:
        resolved(plain(kinds), layers=rules, strict=True)
    assert why in str(caught.value)


def test_a_budget_needs_room_for_the_sinks_and_tail_that_its_layer_ends_up_with(
    resolved: Resolved, plain: Plain
) -> None:
    """The sinks may come from a later rule: what counts is the layer."""
    rules = (LayerRule(match="all", token_budget=128), LayerRule(match=[1], sink_tokens=40))

    with pytest.raises(PolicyError) as caught:
        resolved(plain("ff"), layers=rules)

    assert caught.value.path == "layers.0.token_budget"
    assert caught.value.hint == "write 160 or more"
    assert "128 is too little for 40 sink tokens" in caught.value.message


def test_a_budget_is_made_of_whole_tiles() -> None:
    with pytest.raises(PolicyError) as caught:
        check_rules((LayerRule(match="all", token_budget=1000),))

    assert (caught.value.path, caught.value.hint) == ("layers.0.token_budget", "write 992 or 1024")


@pytest.mark.parametrize(
    ("sinks", "tail", "least"), [(0, 0, 64), (4, 32, 128), (32, 32, 128), (33, 32, 160)]
)
def test_the_least_budget_holds_sinks_the_fullest_tail_and_a_tile(
    sinks: int, tail: int, least: int
) -> None:
    assert least_token_budget(sinks, tail) == least


def test_bytes_stop_growing_at_the_budget(resolved: Resolved, plain: Plain) -> None:
    arch = plain("ff")
    whole = resolved(arch)
    policy = resolved(arch, layers=(LayerRule(match=[1], token_budget=1024),))

    def cost(tokens: int) -> int:
        return kv_bytes(policy, arch, context_tokens=tokens)

    assert cost(1024) == kv_bytes(whole, arch, context_tokens=1024)
    half = kv_bytes(whole, arch, context_tokens=9000) / 2
    assert cost(9000) == half + cost(1024) / 2
    assert kv_cost(policy, arch).bytes_per_token == kv_cost(whole, arch).bytes_per_token / 2
    assert kv_cost(policy, arch).compression == kv_cost(whole, arch).compression
    assert kv_cost(policy, arch).window_bytes == cost(1024) / 2


@pytest.mark.parametrize(
    ("indices", "text"),
    [([3], "layer 3"), ([0, 1, 2], "layers 0-2"), ([0, 2, 3, 9], "layers 0, 2-3, 9")],
)
def test_runs_of_layers_are_written_as_ranges(indices: list[int], text: str) -> None:
    assert layers_text(indices) == text
