"""What a server asks of the memory: bounds of what was measured, and sums for a person to check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.budget import kv_bytes
from daemon.policy.claim import KEPT_BYTES, PROCESS_BYTES, Device, Sizing, padded
from daemon.policy.request import request
from daemon.policy.resolve import resolve
from daemon.policy.spec import KvSpec
from daemon.policy.store import load_policies

MIB = 2**20
Sized = Callable[..., Sizing]


def sizing(device: Device = "cpu", dim: int = 64, value_bytes: int = 4, **kv: Any) -> Sizing:
    """Return the sizing of a model like SmolLM2-135M: 30 layers of 3 KV heads and 9 query heads."""
    layers = tuple(Layer(i, LayerKind.FULL, 3, dim, dim) for i in range(30))
    arch = Architecture("llama", "llama", layers, 9, 8192, 49152)
    policy = resolve(request(KvSpec(**kv), load_policies().policies), arch, allowed=None)
    return Sizing(policy, arch, 513 * MIB, device, value_bytes)


# peak memory beside weights and caches while prompts were read on a CPU: tokens of a prompt, prompts read
# together, MiB (docs/adr/0014-memory-plan.md)
@pytest.mark.parametrize(
    ("kv", "tokens", "rows", "peak"),
    [
        ({}, 1024, 1, 12.2),
        ({}, 4000, 1, 45.7),
        ({}, 600, 4, 53.6),
        ({"mode": "fp16"}, 4000, 1, 40.2),
        # less the 47 MiB by which four caches in full precision grew in that step
        ({"mode": "fp16"}, 600, 4, 74.9 - 47.0),
    ],
)
def test_the_plan_is_no_less_than_what_was_measured(
    kv: dict[str, Any], tokens: int, rows: int, peak: float
) -> None:
    planned = sizing(**kv).scratch_bytes(tokens * rows) // 2  # half of it is what MLX keeps
    assert (
        peak * MIB <= planned + tokens * rows * 3 * 128 * 4
    )  # and a layer unpacked, in the caches


def test_a_sequence_is_its_cache_in_whole_buffers_with_room_and_one_layer_unpacked() -> None:
    model = sizing()
    cache = kv_bytes(model.policy, model.arch, context_tokens=512, value_bytes=4)
    # 16 tiles make room for 9 more; int8 keys and 4-bit values of 64 with their scales
    cache += 9 * 32 * 30 * 3 * (66 + 34)
    assert model.sequence_bytes(500) == model.sequence_bytes(512) == cache + 512 * 3 * 128 * 4
    exact = sizing(mode="fp16")
    assert exact.sequence_bytes(512) == 30 * 3 * 128 * 4 * 512  # nothing is packed


def test_needs_and_wants() -> None:
    model = sizing()
    one = model.sequence_bytes(2048)
    claim = model.claim(max_context=2048, max_concurrent=4, kv_budget="auto")
    assert claim.fixed_bytes == 513 * MIB + PROCESS_BYTES + model.scratch_bytes(2048)
    assert (claim.needs_bytes, claim.wants_bytes) == (
        claim.fixed_bytes + one,
        claim.fixed_bytes + 4 * one,
    )
    limited = model.claim(max_context=2048, max_concurrent=4, kv_budget=2 * one)
    assert limited.wants_bytes == claim.fixed_bytes + 2 * one
    free = model.claim(max_context=2048, max_concurrent=4, kv_budget="none")
    assert free.needs_bytes == free.wants_bytes == claim.wants_bytes


def test_scores_count_only_where_attention_forms_them() -> None:
    fused, unfused = sizing("cuda"), sizing("cuda", dim=96)
    assert unfused.scratch_bytes(8192) - fused.scratch_bytes(8192) > 2 * 9 * 1024 * 8192 * 4
    assert sizing("metal").scratch_bytes(8192) == fused.scratch_bytes(8192)


def test_what_mlx_keeps_is_bounded() -> None:
    model = sizing()
    more = model.scratch_bytes(2_000_000) - model.scratch_bytes(1_000_000)
    per_token = (2 * 9 * 128 + 3 * 128) * 4
    assert more == 1_000_000 * per_token  # past the bound, only what is in use grows
    assert model.scratch_bytes(2_000_000) > 2 * KEPT_BYTES


def test_only_caches_of_mlx_lm_are_padded() -> None:
    assert padded(sizing(mode="fp16").policy)
    assert not padded(sizing().policy)


@given(most=st.integers(0, 4 * 2**30))
def test_the_longest_context_is_one_with_which_the_server_fits(most: int) -> None:
    model = sizing()
    found = model.longest_context(most, most_tokens=100_000)
    if found:
        claim = model.claim(max_context=found, max_concurrent=1, kv_budget="auto")
        assert claim.needs_bytes <= most
    if found < 100_000:
        beyond = model.claim(max_context=found + 512, max_concurrent=1, kv_budget="auto")
        assert beyond.needs_bytes > most
