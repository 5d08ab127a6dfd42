"""policies/architectures.yaml against mlx-lm itself: every module is built tiny and asked for its caches.

The models stay lazy: a forward pass of three tokens builds the graph, which gives the caches their
shapes, and nothing is evaluated.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from importlib.resources import files
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from daemon.cache.convert import read_model
from daemon.policy.architecture import Architecture, Layer, LayerKind, read_architecture
from daemon.policy.rules import architectures
from tests.policy.tiny_configs import COMMON, NOT_BUILT, NOT_RUN, tiny_config

KINDS = {
    "KVCache": LayerKind.FULL,
    "RotatingKVCache": LayerKind.SLIDING,
    "ChunkedKVCache": LayerKind.CHUNKED,
    "ArraysCache": LayerKind.RECURRENT,
    "LayerCache": LayerKind.LATENT,  # deepseek_v41's own
}


def test_the_rules_describe_the_installed_mlx_lm() -> None:
    assert architectures().mlx_lm == importlib.metadata.version("mlx-lm")


def test_aliases_are_those_of_mlx_lm() -> None:
    assert architectures().aliases == MODEL_REMAPPING


def test_architecture_aliases_are_those_of_mlx_lm() -> None:
    ours = {(r.model_type, r.architecture): r.family for r in architectures().architecture_aliases}
    assert ours == MODEL_ARCHITECTURE_REMAPPING


def test_every_model_module_has_a_family() -> None:
    """A new module of mlx-lm must not be met for the first time on a user's machine."""
    shared = {
        "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm",
        "switch_layers",
    }  # fmt: skip
    folder = files("mlx_lm.models")
    modules = {
        entry.name.removesuffix(".py") for entry in folder.iterdir() if entry.name.endswith(".py")
    }
    assert modules - shared - {"__init__"} == architectures().families.keys()


@pytest.mark.parametrize("family", sorted(architectures().families.keys() - NOT_BUILT.keys()))
def test_layers_are_those_that_mlx_lm_builds(family: str) -> None:
    config = tiny_config(family)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    arch = read_architecture(config)
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    caches = mlx_cache.make_prompt_cache(model)
    if family not in NOT_RUN:
        model(mx.array([[1, 2, 3]]), cache=caches)
    own = [layer for layer in arch.layers if layer.kind is not LayerKind.SHARED]

    assert read_model(model).layers == arch.layers  # without a config.json too
    assert [seen_kind(layer) for layer in own] == [cached_kind(cache) for cache in caches]
    if family not in NOT_RUN:
        for layer, cache in zip(own, caches, strict=True):
            check_sizes(layer, cache)


def seen_kind(layer: Layer) -> LayerKind:
    """A latent cache is a KVCache to mlx-lm, but for the one family that has a class of its own."""
    return LayerKind.FULL if layer.kind is LayerKind.LATENT else layer.kind


def cached_kind(cache: Any) -> LayerKind:
    """Return the kind of a cache; one that also holds a recurrent state counts by its keys."""
    kinds = {KINDS[type(part).__name__] for part in parts(cache)}
    if len(kinds) > 1:
        kinds.discard(LayerKind.RECURRENT)
    (kind,) = kinds
    return LayerKind.FULL if kind is LayerKind.LATENT else kind


def parts(cache: Any) -> list[Any]:
    return list(cache.caches) if isinstance(cache, mlx_cache.CacheList) else [cache]


def check_sizes(layer: Layer, cache: Any) -> None:
    """Compare heads, lengths and window with the arrays that the forward pass left in the cache."""
    held = [part for part in parts(cache) if getattr(part, "keys", None) is not None]
    if not held:
        return
    main, *others = held
    if layer.indexer_dim:
        (indexer,) = others
        assert layer.indexer_dim == indexer.keys.shape[3] + indexer.values.shape[3]
        others = []
    heads = sum(part.keys.shape[1] for part in (main, *others) if part.values.shape[3])
    assert (layer.n_kv_heads, layer.head_dim_k, layer.head_dim_v) == (
        heads,
        main.keys.shape[3],
        main.values.shape[3],
    )
    match main:
        case mlx_cache.RotatingKVCache():
            assert layer.window == main.max_size
        case mlx_cache.ChunkedKVCache():
            assert layer.window == main.chunk_size


@pytest.mark.parametrize("family", sorted(architectures().families.keys() - {"olmo"}))
def test_defaults_are_those_of_mlx_lm(family: str) -> None:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    found: dict[str, set[Any]] = {}
    for value in vars(module).values():
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                if field.default not in (dataclasses.MISSING, None):
                    found.setdefault(field.name, set()).add(field.default)
    wrong = {
        key: (value, found.get(key))
        for key, value in architectures().families[family].defaults.items()
        if value not in found.get(key, ())
    }
    wrong = {key: pair for key, pair in wrong.items() if (family, key) not in SET_IN_CODE}
    assert wrong == {}


# gemma3, gemma4 and pixtral fill these in with `text_config.get(key, default)`, plamo3 renames one
SET_IN_CODE = {
    ("gemma3", "num_attention_heads"), ("gemma3", "num_key_value_heads"), ("gemma4", "num_attention_heads"),
    ("gemma4", "num_key_value_heads"), ("pixtral", "num_attention_heads"), ("plamo3", "sliding_window"),
}  # fmt: skip


def test_nested_and_flat_configs_of_one_model_agree() -> None:
    """qwen3_5 takes both; a repacked checkpoint must not change what is resolved."""

    def layers(config: dict[str, Any]) -> Architecture:
        return dataclasses.replace(read_architecture(config), notes=())

    flat = {**COMMON, "model_type": "qwen3_5"}
    assert layers(flat) == layers({"model_type": "qwen3_5", "text_config": COMMON})
