from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from daemon.cache import build
from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.measure import divergence
from daemon.measure.texts import Passage
from daemon.policy.architecture import read_architecture
from daemon.policy.request import request
from daemon.policy.resolve import resolve
from daemon.policy.schemes import parse_scheme
from daemon.policy.spec import KvSpec
from daemon.policy.store import load_policies
from tests.cache.test_architectures import built

TOKENS = [(i * 131 + 7) % 499 for i in range(400)]


def passage(start: int, prompt: int = 120, score: int = 20) -> Passage:
    return Passage(tuple(TOKENS[start : start + prompt + score]), score)


def row(scheme: str, tail_tokens: int = 32) -> divergence.Pack:
    like = Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=tail_tokens)
    return lambda caches: build.convert(caches, lambda _: like)


def scores(model: Any, windows: list[divergence.Window], pack: divergence.Pack) -> Any:
    reference = divergence.decode(model, windows, divergence.exact)
    got = divergence.decode(model, windows, pack)
    return divergence.compare(reference, got, [window.tokens[1:] for window in windows])


def test_the_unpacked_cache_does_not_diverge_and_fewer_bits_diverge_more(model: Any) -> None:
    windows = [divergence.prefill(model, passage(start)) for start in (0, 50)]

    means = [
        divergence.summarize(scores(model, windows, row(scheme))).mean
        for scheme in ("fp16", "int8", "turbo4v4", "turbo3v3", "turbo2v2")
    ]

    assert means[0] == pytest.approx(0, abs=1e-9)  # another order of operations, in float32
    assert means == sorted(means)
    assert means[1] > 100 * abs(means[0])


@pytest.mark.parametrize("tail_tokens", [0, 32])
@pytest.mark.parametrize("prompt", [119, 128])
def test_decoding_in_blocks_is_decoding_one_by_one(
    model: Any, monkeypatch: pytest.MonkeyPatch, tail_tokens: int, prompt: int
) -> None:
    """A token enters a tile at the same moment either way, so the divergence is that of decoding."""
    windows = [divergence.prefill(model, passage(0, prompt=prompt, score=50))]
    in_blocks = divergence.decode(model, windows, row("turbo2v2", tail_tokens))
    monkeypatch.setattr(divergence, "BLOCK", 1)
    one_by_one = divergence.decode(model, windows, row("turbo2v2", tail_tokens))

    np.testing.assert_allclose(in_blocks, one_by_one, atol=1e-4)


def test_windows_decoded_together_are_decoded_apart(model: Any) -> None:
    windows = [divergence.prefill(model, passage(start)) for start in (0, 50, 90)]
    together = divergence.decode(model, windows, row("turbo4v4"))
    apart = [divergence.decode(model, [window], row("turbo4v4")) for window in windows]

    np.testing.assert_allclose(together, np.concatenate(apart), atol=1e-4)


def test_a_window_may_be_decoded_again_and_again(model: Any) -> None:
    """The next policy must find the caches as they were prefilled."""
    windows = [divergence.prefill(model, passage(0))]
    first = divergence.decode(model, windows, divergence.exact)
    divergence.decode(model, windows, row("turbo2v2"))

    assert np.array_equal(first, divergence.decode(model, windows, divergence.exact))
    assert {cache.offset for cache in windows[0].caches} == {119}


HYBRIDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "vocab_size": 499, "sliding_window": 64, "sliding_window_pattern": 2, "max_position_embeddings": 512,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
        "num_attention_heads": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [], "moe_intermediate_size": 64, "rms_norm_eps": 1e-5, "vocab_size": 499,
        "num_key_value_heads": 2, "rope_theta": 1000.0, "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512, "head_dim": 64, "full_attention_interval": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_sliding_and_recurrent_layers_stay_exact_beside_packed_ones(name: str) -> None:
    import importlib

    from daemon.cache import seam

    seam.install()
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(3)
    hybrid = module.Model(module.ModelArgs.from_dict(HYBRIDS[name]))
    mx.eval(hybrid.parameters())
    arch = read_architecture(HYBRIDS[name])
    kv = request(KvSpec(mode="turbo4v4"), load_policies().policies)
    factory = build.plan_caches(hybrid, resolve(kv, arch, allowed="a test").layers)
    windows = [divergence.prefill(hybrid, passage(start)) for start in (0, 50)]

    packed = divergence.summarize(scores(hybrid, windows, factory.packed))
    exact = divergence.summarize(scores(hybrid, windows, divergence.exact))

    ours = [isinstance(it, SequenceCache) for it in factory.packed(windows[0].caches)]
    assert ours == [False, True, False, True]
    assert exact.mean == pytest.approx(0, abs=1e-8)
    assert packed.mean > 10 * abs(exact.mean)


def test_what_is_packed_inside_composite_caches_diverges() -> None:
    one = built("baichuan_m1")
    tokens = tuple(token % 96 for token in TOKENS)
    windows = [divergence.prefill(one.model, Passage(tokens[at : at + 140], 20)) for at in (0, 50)]

    reference = divergence.decode(one.model, windows, divergence.exact)
    packed = divergence.decode(one.model, windows, one.factory.packed)

    assert np.abs(packed - reference).max() > 1e-5
    assert np.isfinite(packed).all()


def test_figures_are_those_of_known_distributions() -> None:
    """KL((½, ½) ‖ (¼, ¾)) = ½·ln(4/3) = 0.1438 nats."""
    half, quarter = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    reference = np.array([[half, half], [half, half]], dtype=np.float32)
    quantized = np.array([[half, quarter], [half, half]], dtype=np.float32)

    got = divergence.summarize(divergence.compare(reference, quantized, [[0, 0], [1, 1]]))

    assert got.positions == 4
    assert got.mean == pytest.approx(0.5 * np.log(4 / 3) / 4, rel=1e-5)
    assert got.median == pytest.approx(0, abs=1e-7)
    assert got.top1_agreement == 0.75
    # the two windows' means are ½·ln(4/3)/2 and 0
    assert got.standard_error == pytest.approx(0.5 * np.log(4 / 3) / 4, rel=1e-5)
    assert got.reference_perplexity == pytest.approx(2)
    # one of four true tokens got ¼ instead of ½: 2·2^¼
    assert got.perplexity_delta == pytest.approx(2**0.25 - 1)


def test_one_window_has_no_standard_error() -> None:
    one = np.log(np.full((1, 2, 2), 0.5, dtype=np.float32))
    assert divergence.summarize(divergence.compare(one, one, [[0, 1]])).standard_error is None
