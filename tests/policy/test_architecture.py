from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon.errors import PolicyError
from daemon.policy.architecture import Architecture, LayerKind, read_architecture
from daemon.policy.rules import architectures

CONFIGS = Path(__file__).parent.parent / "data" / "configs"

Config = Callable[[str], dict[str, Any]]
Arch = Callable[[str], Architecture]

# name → layers by kind, query heads, {(KV heads, length of keys, of values, window)} and context
REAL: dict[str, tuple[dict[str, int], int, set[tuple[int, int, int, int | None]], int | None]] = {
    "deepseek_v2": ({"full": 32}, 32, {(32, 192, 128, None)}, 2048),
    "deepseek_v3": ({"latent": 61}, 128, {(1, 512, 64, None)}, 4096),
    "deepseek_v32": ({"latent": 61}, 128, {(1, 512, 64, None)}, 163840),
    "falcon_h1": ({"full": 32}, 32, {(8, 64, 64, None)}, 8192),
    "gemma2": ({"full": 26}, 8, {(4, 256, 256, None)}, 8192),
    "gemma3": ({"sliding": 22, "full": 4}, 8, {(4, 256, 256, None), (4, 256, 256, 4096)}, 131072),
    "gemma3n": (
        {"sliding": 16, "full": 4, "shared": 15}, 8, {(2, 256, 256, None), (2, 256, 256, 512)}, 32768,
    ),
    "gemma4": ({"sliding": 25, "full": 5}, 8, {(4, 256, 256, 512), (4, 512, 512, None)}, 131072),
    "glm4_moe_lite": ({"latent": 47}, 20, {(1, 512, 64, None)}, 202752),
    "gpt2": ({"full": 12}, 12, {(12, 64, 64, None)}, 1024),
    "gpt_oss": ({"sliding": 18, "full": 18}, 64, {(8, 64, 64, None), (8, 64, 64, 128)}, 131072),
    "jamba": ({"recurrent": 28, "full": 4}, 32, {(8, 128, 128, None)}, 262144),
    "llama": ({"full": 32}, 32, {(32, 128, 128, None)}, 2048),
    "llama4": ({"chunked": 36, "full": 12}, 40, {(8, 128, 128, None), (8, 128, 128, 8192)}, 131072),
    "mamba2": ({"recurrent": 64}, 0, set(), None),
    "mistral": ({"full": 32}, 32, {(8, 128, 128, None)}, 131072),
    "nemotron_h": ({"recurrent": 1, "full": 1}, 32, {(8, 128, 128, None)}, 4096),
    "phi3": ({"full": 32}, 32, {(32, 96, 96, None)}, 4096),
    "qwen2": ({"full": 32}, 32, {(32, 128, 128, None)}, 32768),
    "qwen2_vl": ({"full": 80}, 64, {(8, 128, 128, None)}, 32768),
    "qwen3": ({"full": 32}, 32, {(32, 128, 128, None)}, 32768),
    "qwen3_5": ({"recurrent": 24, "full": 8}, 16, {(4, 256, 256, None)}, 32768),
    "qwen3_next": ({"recurrent": 36, "full": 12}, 16, {(2, 256, 256, None)}, 32768),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_real_configuration_gives_its_layers(name: str, arch: Arch) -> None:
    kinds, n_heads, vectors, context = REAL[name]
    read = arch(name)
    assert Counter(layer.kind.value for layer in read.layers) == kinds
    assert read.n_heads == n_heads
    assert read.max_context == context
    assert {
        (layer.n_kv_heads, layer.head_dim_k, layer.head_dim_v, layer.window)
        for layer in read.layers
        if layer.n_kv_heads
    } == vectors


def test_every_stored_configuration_is_tested_and_says_where_it_is_from() -> None:
    stored = {path.stem: json.loads(path.read_text()) for path in CONFIGS.glob("*.json")}
    assert stored.keys() == REAL.keys()
    assert all("transformers" in content["_source"] for content in stored.values())


def test_layers_are_numbered_in_the_order_of_their_caches(arch: Arch) -> None:
    for name in REAL:
        layers = arch(name).layers
        assert [layer.index for layer in layers] == list(range(len(layers)))


def test_hybrids_attend_in_every_fourth_layer(arch: Arch) -> None:
    full = [layer.index for layer in arch("qwen3_next").layers if layer.kind is LayerKind.FULL]
    assert full == list(range(3, 48, 4))


def test_shared_layers_read_the_last_cache_of_their_own_kind(arch: Arch) -> None:
    layers = arch("gemma3n").layers
    assert {layer.source for layer in layers if layer.kind is LayerKind.SHARED} == {18, 19}
    assert layers[18].kind is LayerKind.SLIDING
    assert layers[19].kind is LayerKind.FULL


def test_an_indexer_keeps_values_beside_the_latent(arch: Arch) -> None:
    assert {layer.indexer_dim for layer in arch("deepseek_v32").layers} == {2 * 128}


def test_qwen2_needs_protected_boundary_keys_and_qwen3_does_not(arch: Arch) -> None:
    assert (arch("qwen2").boundary_k, arch("qwen2_vl").boundary_k) == (2, 2)
    assert arch("qwen3").boundary_k == 0


def test_learned_sinks_and_stock_caches_are_told(arch: Arch) -> None:
    assert arch("gpt_oss").learned_sinks
    assert not arch("llama").learned_sinks
    assert "gemma2" in str(arch("gemma2").stock_cache)
    assert arch("gemma2").eligible == ()


def test_a_model_that_runs_one_sequence_at_a_time_says_so(arch: Arch) -> None:
    assert [arch(name).batching for name in ("llama", "jamba", "gemma2")] == [
        "rows",
        "prefill_alone",
        "alone",
    ]
    assert any("max_concurrent counts as 1" in note for note in arch("gemma2").notes)


def test_a_default_of_mlx_lm_is_noted(arch: Arch) -> None:
    assert (
        '"sliding_window_pattern" is missing from config.json; mlx-lm takes 6'
        in arch("gemma3").notes
    )


def test_null_counts_as_missing(config: Config) -> None:
    assert read_architecture(config("llama") | {"head_dim": None}).layers[0].head_dim_k == 128


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("mistral", "llama"), ("kimi_k2", "deepseek_v3"), ("deepseek_v3.2", "deepseek_v32")],
)
def test_aliases_and_spellings_lead_to_a_family(model_type: str, family: str) -> None:
    assert architectures().family_of(model_type) == family


def test_the_architecture_name_can_choose_the_family() -> None:
    rules = architectures()
    assert rules.family_of("bailing_hybrid", ("BailingMoeV3ForCausalLM",)) == "bailing_moe_v3"
    assert rules.family_of("bailing_hybrid", ("Other",)) == "bailing_hybrid"


def test_a_vision_wrapper_uses_the_text_model_that_its_config_names(config: Config) -> None:
    text = {**config("deepseek_v3"), "model_type": "mistral4"}
    read = read_architecture({"model_type": "mistral3", "text_config": text})
    assert read.family == "mistral3"
    assert {layer.kind for layer in read.layers} == {LayerKind.LATENT}


def test_a_linear_layer_in_place_of_attention_caches_nothing() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"no_op": True}},
        {"attention": {"replace_with_linear": True}},
        {"attention": {"n_heads_in_group": 16}},
    ]
    read = read_architecture({
        "model_type": "nemotron-nas", "num_hidden_layers": 4, "num_attention_heads": 64, "hidden_size": 8192,
        "block_configs": blocks,
    })  # fmt: skip
    assert [(layer.kind, layer.n_kv_heads) for layer in read.layers] == [
        (LayerKind.FULL, 8),
        (LayerKind.RECURRENT, 0),
        (LayerKind.FULL, 4),
    ]


def test_an_unknown_model_type_suggests_the_nearest() -> None:
    with pytest.raises(PolicyError, match='no model of type "qwen3_5_text"') as caught:
        read_architecture({"model_type": "qwen3_5_text"})
    assert "qwen3_5" in str(caught.value.hint)


@pytest.mark.parametrize(
    "config", [{"model_type": "whisper"}, {"model_type": "new_vl", "vision_config": {}}]
)
def test_a_vision_or_audio_model_is_refused_until_mlx_vlm(config: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="refused until mlx-vlm is integrated"):
        read_architecture(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": None}, 'no "model_type"'),
        ("llama", {"hidden_size": None, "head_dim": None}, 'lacks "hidden_size"'),
        ("llama", {"num_attention_heads": None, "head_dim": None}, 'lacks "num_attention_heads"'),
        ("llama", {"num_hidden_layers": None}, "how many layers"),
        ("llama", {"num_hidden_layers": 10**9}, "more than 4096"),
        ("llama", {"num_hidden_layers": "32"}, "\"num_hidden_layers\" is '32'"),
        ("llama", {"num_key_value_heads": 0}, '"num_key_value_heads" is 0'),
        ("llama", {"layer_types": ["full_attention"] * 5}, "5 entries for a model of 32 layers"),
        ("jamba", {"attn_layer_period": None}, 'lacks "attn_layer_period"'),
        ("nemotron_h", {"layers_block_type": ["fast"]}, 'unknown kind "fast"'),
        ("nemotron_h", {"layers_block_type": None}, 'lacks "hybrid_override_pattern" or'),
        ("gemma3n", {"text_config": None}, 'no "text_config"'),
    ],
)
def test_a_key_that_decides_something_is_named(
    name: str, changes: dict[str, Any], message: str, config: Config
) -> None:
    with pytest.raises(PolicyError, match=message):
        read_architecture(config(name) | changes)
