from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.budget import kv_bytes, kv_cost, longest_context, weights_bytes
from daemon.policy.request import request
from daemon.policy.resolve import resolve
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.spec import KvSpec, NamedPolicy
from daemon.policy.store import load_policies

Arch = Callable[[str], Architecture]
Plain = Callable[..., Architecture]

# of one layer with 2 KV heads of 64: keys and values at 16 bits, and turbo8v4 with a scale a vector
EXACT = 2 * (128 + 128)
PACKED = 2 * ((64 + 2) + (32 + 2))


@pytest.fixture
def policy(policies: dict[str, NamedPolicy]) -> Callable[..., ResolvedPolicy]:
    def run(arch: Architecture, **keys: Any) -> ResolvedPolicy:
        return resolve(request(KvSpec(**keys), policies), arch, allowed="a test")

    return run


Policy = Callable[..., ResolvedPolicy]


def test_bytes_per_token_follow_from_bits_heads_and_lengths(policy: Policy, arch: Arch) -> None:
    """Llama 2 7B: 512 KiB a token in a 16-bit cache, as published everywhere."""
    llama = arch("llama")
    cost = kv_cost(policy(llama), llama)
    assert cost.bytes_per_token_fp16 == 512 * 1024
    assert cost.bytes_per_token == 32 * 32 * ((128 + 2) + (64 + 2))
    assert cost.compression == pytest.approx(16 / 6.125)
    assert (cost.window_bytes, cost.constant_layers) == (0, 0)


def test_compression_is_that_of_the_bits_per_value(policy: Policy, arch: Arch) -> None:
    llama = arch("llama")
    for name, shipped in load_policies().policies.items():
        resolved = policy(llama, policy=name)
        assert kv_cost(resolved, llama).compression == 16 / shipped.bits_per_value[128]


def test_a_latent_token_costs_its_vector_its_rotary_key_and_the_indexer(
    policy: Policy, arch: Arch
) -> None:
    v3, v32 = arch("deepseek_v3"), arch("deepseek_v32")
    assert kv_cost(policy(v3), v3).bytes_per_token == 61 * (512 + 64) * 2
    assert kv_cost(policy(v32), v32).bytes_per_token == 61 * (512 + 64 + 256) * 2


def test_a_packed_latent_costs_a_byte_a_value_its_scale_and_its_rotary_key(
    policy: Policy, arch: Arch
) -> None:
    v3 = arch("deepseek_v3")
    assert kv_cost(policy(v3, mode="int8"), v3).bytes_per_token == 61 * (512 + 2 + 64 * 2)


def test_layers_with_a_window_and_recurrent_layers_do_not_grow(
    policy: Policy, plain: Plain
) -> None:
    hybrid = plain("sfr")
    cost = kv_cost(policy(hybrid), hybrid)
    assert cost.bytes_per_token == PACKED
    assert cost.window_bytes == 128 * EXACT
    assert cost.constant_layers == 1


def test_nothing_that_grows_compresses_by_one(policy: Policy, plain: Plain) -> None:
    recurrent = plain("rr")
    assert kv_cost(policy(recurrent), recurrent).compression == 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, 0),
        (20, 20 * EXACT),
        (64, 32 * PACKED + 64 * EXACT),
        (1000, 30 * 32 * PACKED + (63 + 4) * EXACT),
    ],
)
def test_sinks_and_the_fullest_tail_stay_at_16_bits(
    tokens: int, expected: int, policy: Policy, plain: Plain
) -> None:
    one = plain("f")
    assert kv_bytes(policy(one), one, context_tokens=tokens) == expected


def test_without_a_tail_every_token_is_packed(policy: Policy, plain: Plain) -> None:
    one = plain("f")
    resolved = policy(one, tail_tokens=0, sink_tokens=0)
    assert kv_bytes(resolved, one, context_tokens=33) == 64 * PACKED


def test_a_window_is_the_most_that_its_layer_keeps(policy: Policy, plain: Plain) -> None:
    sliding = plain("sc")
    resolved = policy(sliding)
    assert kv_bytes(resolved, sliding, context_tokens=100) == 2 * 100 * EXACT
    assert kv_bytes(resolved, sliding, context_tokens=10_000) == 2 * 128 * EXACT


def test_a_fold_of_several_tiles_leaves_the_tail_at_once(policy: Policy, plain: Plain) -> None:
    model = plain("f")
    resolved = policy(model, mode="turbo8v4", sink_tokens=0, tail_tokens=256, fold_tokens=128)

    def cost(tokens: int) -> int:
        return kv_bytes(resolved, model, context_tokens=tokens)

    assert cost(383) == 383 * EXACT
    assert cost(384) == cost(511) == 128 * PACKED + 383 * EXACT
    assert cost(512) == 256 * PACKED + 383 * EXACT


def test_shared_layers_cost_nothing_of_their_own(policy: Policy) -> None:
    own = (Layer(0, LayerKind.FULL, 2, 64, 64),)
    shared = (*own, Layer(1, LayerKind.SHARED, source=0))
    costs = []
    for layers in (own, shared):
        arch = Architecture("gemma3n", "gemma3n", layers, 4, 8192, 100)
        costs.append(kv_bytes(policy(arch), arch, context_tokens=500))
    assert costs[0] == costs[1]


def test_sequences_multiply(policy: Policy, plain: Plain) -> None:
    model = plain("fsf")
    resolved = policy(model)
    one = kv_bytes(resolved, model, context_tokens=300)
    assert kv_bytes(resolved, model, context_tokens=300, sequences=8) == 8 * one


def test_only_safetensors_count_as_weights(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(70))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(30))
    (tmp_path / "tokenizer.json").write_bytes(bytes(999))
    assert weights_bytes(tmp_path) == 100


def test_full_precision_counts_the_numbers_of_the_model(policy: Policy, plain: Plain) -> None:
    model = plain("f")
    exact = policy(model, mode="fp16")
    at_16, at_32 = (kv_bytes(exact, model, context_tokens=256, value_bytes=size) for size in (2, 4))
    assert at_32 == 2 * at_16
    packed = policy(model, mode="int8", sink_tokens=0, tail_tokens=0)
    assert kv_bytes(packed, model, context_tokens=256, value_bytes=4) == kv_bytes(
        packed, model, context_tokens=256
    )
    keys = policy(model, mode="turbo0v4", sink_tokens=0, tail_tokens=0)
    more = kv_bytes(keys, model, context_tokens=256, value_bytes=4) - kv_bytes(
        keys, model, context_tokens=256
    )
    assert more == at_16 // 2  # the keys only


def test_a_prompt_that_is_packed_when_decoded_counts_in_full_until_then(
    policy: Policy, plain: Plain
) -> None:
    model = plain("f")
    late, early, exact = (
        policy(model, mode="int8", compress="first_decode"),
        policy(model, mode="int8"),
        policy(model, mode="fp16"),
    )
    costs = [
        [kv_bytes(it, model, context_tokens=tokens) for it in (late, early, exact)]
        for tokens in (1024, 100_000)
    ]
    assert costs[0][0] == costs[0][2] > costs[0][1]
    assert costs[1][0] == costs[1][1]


@given(tokens=st.integers(0, 5000), tail=st.sampled_from([0, 32, 64]), sinks=st.integers(0, 64))
def test_a_longer_context_never_costs_less(tokens: int, tail: int, sinks: int) -> None:
    arch, resolved = two_layers(tail_tokens=tail, sink_tokens=sinks)
    shorter = kv_bytes(resolved, arch, context_tokens=tokens)
    assert shorter <= kv_bytes(resolved, arch, context_tokens=tokens + 1)


@given(free=st.integers(0, 3_000_000), most=st.integers(1, 4096))
def test_the_longest_context_fits_and_one_tile_more_does_not(free: int, most: int) -> None:
    arch, resolved = two_layers()
    found = longest_context(
        lambda tokens: kv_bytes(resolved, arch, context_tokens=tokens),
        free_bytes=free,
        most_tokens=most,
    )
    assert found <= most
    assert kv_bytes(resolved, arch, context_tokens=found) <= free
    if found < most:
        more = min(found + 32, most)
        assert kv_bytes(resolved, arch, context_tokens=more) > free


def two_layers(**keys: Any) -> tuple[Architecture, ResolvedPolicy]:
    layers = (
        Layer(0, LayerKind.FULL, 2, 64, 64),
        Layer(1, LayerKind.SLIDING, 2, 64, 64, window=128),
    )
    arch = Architecture("llama", "llama", layers, 4, 8192, 100)
    asked = request(KvSpec(**keys), load_policies().policies)
    return arch, resolve(asked, arch, allowed=None)
