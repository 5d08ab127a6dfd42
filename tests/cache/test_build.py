from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from daemon.cache import build, cost
from daemon.cache.latent import LatentCache
from daemon.cache.sequence import SequenceCache
from daemon.kernels import packing
from daemon.policy.architecture import LayerKind
from daemon.policy.resolved import LayerPlan
from daemon.policy.schemes import parse_scheme

VOCAB = 499


def plans(
    count: int, scheme: str = "turbo8v4", *, kinds: dict[int, LayerKind] | None = None
) -> list[LayerPlan]:
    made = []
    for index in range(count):
        kind = (kinds or {}).get(index, LayerKind.FULL)
        effective = scheme if kind is LayerKind.FULL else "fp16"
        made.append(
            LayerPlan(index, kind, scheme, parse_scheme(effective), sink_tokens=4, tail_tokens=32)
        )
    return made


def tiny(name: str, **options: Any) -> Any:
    """Build a model of *name* with random weights and the smallest sensible shape."""
    import importlib

    module = importlib.import_module(f"mlx_lm.models.{name}")
    base: dict[str, Any] = {
        "model_type": name,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict({**base, **options}))
    mx.eval(model.parameters())
    return model


FAMILIES: dict[str, tuple[dict[str, Any], dict[int, LayerKind]]] = {
    "llama": ({}, {}),
    "qwen2": ({}, {}),
    "qwen3": ({}, {}),
    "phi3": ({"rope_scaling": None}, {}),
    "gemma3_text": (
        {"sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
        {0: LayerKind.SLIDING, 2: LayerKind.SLIDING},
    ),
    "gpt_oss": (
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_scaling": None,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {0: LayerKind.SLIDING, 2: LayerKind.SLIDING},
    ),
    "qwen3_next": (
        {
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [],
            "moe_intermediate_size": 64,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 4,
        },
        {0: LayerKind.RECURRENT, 1: LayerKind.RECURRENT, 2: LayerKind.RECURRENT},
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, list[LayerPlan]]:
    options, kinds = FAMILIES[request.param]
    return tiny(request.param, **options), plans(4, kinds=kinds)


def test_plain_growing_caches_are_ours_and_the_rest_is_mlx_lms(
    family: tuple[Any, list[LayerPlan]],
) -> None:
    model, layers = family
    factory = build.probe(model, build.plan_caches(model, layers), VOCAB)

    for plan, cache, stock in zip(factory.plans, factory(), make_prompt_cache(model), strict=True):
        assert plan.reason is None
        if plan.kind is LayerKind.FULL:
            assert type(stock) is KVCache
            assert isinstance(cache, SequenceCache)
        else:
            assert type(cache) is type(stock)
            assert isinstance(cache, RotatingKVCache | ArraysCache)


def test_logits_of_packed_caches_stay_close_to_exact_ones(
    family: tuple[Any, list[LayerPlan]],
) -> None:
    """8-bit keys and 4-bit values over 120 tokens, prefilled in two chunks and then decoded."""
    model, layers = family
    factory = build.plan_caches(model, layers)
    tokens = (mx.arange(120)[None] * 7919 + 11) % VOCAB
    results = []
    for caches in (make_prompt_cache(model), factory()):
        model(tokens[:, :70], cache=caches)
        model(tokens[:, 70:112], cache=caches)
        results.append(
            mx.concatenate(
                [model(tokens[:, i : i + 1], cache=caches) for i in range(112, 120)], axis=1
            )
        )

    exact, packed = results
    error = mx.linalg.norm((packed - exact).flatten()) / mx.linalg.norm(exact.flatten())
    assert 0 < error.item() < 0.1


def test_the_probe_attends_to_packed_tokens_however_long_the_tail_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault that only packed tokens show must not wait for the first long request."""
    model = tiny("llama")
    layers = [
        replace(plan, sink_tokens=64, tail_tokens=256, fold_tokens=128, exact_prompt=2048)
        for plan in plans(4)
    ]

    def fail(*_: Any) -> None:
        raise RuntimeError("no packed attention today")

    monkeypatch.setattr(packing, "unpack", fail)
    factory = build.probe(model, build.plan_caches(model, layers), VOCAB)

    assert not factory.any_packed
    assert "no packed attention today" in (factory.plans[0].reason or "")


def test_a_failing_probe_falls_back_with_a_reason() -> None:
    """A model that computes on keys itself cannot use views: it gets mlx-lm's caches and says why."""
    model = tiny(
        "stablelm",
        layer_norm_eps=1e-5,
        use_qkv_bias=False,
        partial_rotary_factor=0.5,
        norm_eps=1e-5,
    )

    factory = build.probe(model, build.plan_caches(model, plans(4)), VOCAB)

    assert not factory.any_packed
    assert {plan.effective.name for plan in factory.plans} == {"fp16"}
    assert "needs plain keys and values" in (factory.plans[0].reason or "")
    assert all(type(cache) is KVCache for cache in factory())


class MixedAttention(nn.Module):
    """A plain layer, then a latent one; *touches* names the one whose code computes on what its cache returned."""

    def __init__(self, touches: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = ["full", "latent"]
        self.touches = touches

    def make_cache(self) -> list[KVCache]:
        return [KVCache(), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.embed(tokens)[:, None]
        mask = base.create_attention_mask(x[:, 0], cache[0], return_array=True)
        keys, values = cache[0].update_and_fetch(x, x)
        if self.touches == "full":
            keys = keys * 1.0
        attend = base.scaled_dot_product_attention
        x = x + attend(x, keys, values, cache=cache[0], scale=0.2, mask=mask)
        latents, rotary = cache[1].update_and_fetch(x, x[..., :8])
        if self.touches == "latent":
            latents = latents * 1.0
        scores = x[..., :8] @ rotary.swapaxes(-1, -2)
        if mask is not None:
            scores = mx.where(mask, scores, -1e9)
        x = x + attend(x, latents, latents, cache=cache[1], scale=0.2, mask=scores)
        return x[:, 0] @ self.embed.weight.T


def mixed_plans() -> list[LayerPlan]:
    schemes = {LayerKind.FULL: "turbo8v4", LayerKind.LATENT: "turbo8v0"}
    return [
        LayerPlan(index, kind, scheme, parse_scheme(scheme), sink_tokens=4, tail_tokens=32)
        for index, (kind, scheme) in enumerate(schemes.items())
    ]


def test_a_model_of_plain_and_latent_layers_gets_both_kinds_of_cache() -> None:
    model = MixedAttention("")

    factory = build.probe(model, build.plan_caches(model, mixed_plans()), VOCAB)

    assert [type(cache) for cache in factory()] == [SequenceCache, LatentCache]


@pytest.mark.parametrize(
    ("touches", "classes"),
    [("full", [KVCache, LatentCache]), ("latent", [SequenceCache, KVCache])],
)
def test_only_the_kind_of_layer_that_fails_falls_back(touches: str, classes: list[type]) -> None:
    model = MixedAttention(touches)

    factory = build.probe(model, build.plan_caches(model, mixed_plans()), VOCAB)

    assert [type(cache) for cache in factory()] == classes
    failed = [plan for plan in factory.plans if plan.kind == touches]
    assert [plan.effective.name for plan in failed] == ["fp16"]
    assert "needs plain keys and values" in str(failed[0].reason)
    assert all(plan.reason is None for plan in factory.plans if plan.kind != touches)


def test_what_a_model_raises_on_its_own_caches_is_raised() -> None:
    """Then it is not our caches that do not fit: falling back would hide that the model cannot run at all."""

    class Broken(MixedAttention):
        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            raise RuntimeError("no kernel for this device")

    model = Broken("")

    with pytest.raises(RuntimeError, match="no kernel for this device"):
        build.probe(model, build.plan_caches(model, mixed_plans()), VOCAB)


def test_growing_members_of_a_composite_cache_are_ours_and_the_rest_is_mlx_lms() -> None:
    model = tiny("llama")
    model.make_cache = lambda: [CacheList(ArraysCache(1), KVCache()) for _ in range(4)]

    made = build.plan_caches(model, plans(4))()

    assert [[type(part) for part in cache.caches] for cache in made] == [
        [ArraysCache, SequenceCache]
    ] * 4


def test_a_model_that_runs_alone_refuses_a_second_row() -> None:
    model = tiny("llama")
    factory = build.plan_caches(model, plans(4), batching="alone")
    (first, *_), (second, *_) = factory(), factory()

    assert first.merge([first]) is first
    assert first.extract(0) is first
    assert isinstance(first, SequenceCache)
    for join in (lambda: first.merge([first, second]), lambda: first.extend(second)):
        with pytest.raises(ValueError, match="one sequence at a time"):
            join()


def test_boundary_layers_in_full_precision_share_the_class_of_their_neighbours() -> None:
    """mlx-lm makes one mask for all full layers: they must agree on what it means."""
    model = tiny("llama")
    layers = plans(4)
    layers[0] = LayerPlan(
        0, LayerKind.FULL, "turbo8v4", parse_scheme("fp16"), sink_tokens=0, tail_tokens=0
    )

    factory = build.plan_caches(model, layers)

    assert [type(cache) for cache in factory()] == [SequenceCache] * 4
    assert factory()[0].row.scheme.name == "fp16"


def test_a_model_in_full_precision_keeps_mlx_lms_caches() -> None:
    model = tiny("llama")

    factory = build.plan_caches(model, plans(4, "fp16"))

    assert [type(cache) for cache in factory()] == [KVCache] * 4


def test_a_number_of_caches_that_fits_no_plan_falls_back() -> None:
    model = tiny("llama")

    factory = build.plan_caches(model, plans(3))

    assert not factory.any_packed
    assert factory.plans[3].reason == "the model makes 4 caches for 3 layers"


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        ("turbo8v4", 8 + 4),
        ("int8", 16),
        ("turbo5v4", 9),
        ("turbo4v4", 8),
        ("turbo3.5v3.5", 7),
        ("turbo3tv3t", 6),
        ("turbo8v3", 11),
        ("turbo4v3", 7),
        ("affine4", 9),  # two fp16 numbers a group of 32, and only one is in the formula
    ],
)
def test_measured_bytes_per_token_are_those_of_the_scheme(scheme: str, bits: int) -> None:
    model = tiny("llama")

    found = cost.measure(model, build.plan_caches(model, plans(4, scheme)))

    assert found.effective == 4 * 2 * (32 * bits + 16 + 16) / 8
    assert found.fp16 == 4 * 2 * 32 * 2 * 2


@pytest.mark.parametrize(
    ("sinks", "tail", "fold"), [(4, 32, 32), (600, 0, 32), (700, 256, 128), (0, 32, 96)]
)
def test_measured_bytes_do_not_depend_on_sinks_tail_and_fold(
    sinks: int, tail: int, fold: int
) -> None:
    layers = [
        replace(plan, sink_tokens=sinks, tail_tokens=tail, fold_tokens=fold) for plan in plans(4)
    ]
    model = tiny("llama")

    found = cost.measure(model, build.plan_caches(model, layers))

    assert found.effective == 4 * 2 * (32 * 12 + 16 + 16) / 8


def test_the_fold_of_a_plan_is_that_of_its_cache() -> None:
    model = tiny("llama")
    layers = [replace(plan, tail_tokens=256, fold_tokens=128) for plan in plans(4)]

    caches = build.plan_caches(model, layers)()

    assert {(cache.row.tail_tokens, cache.row.fold_tokens) for cache in caches} == {(256, 128)}


def test_full_precision_is_measured_as_the_model_computes() -> None:
    """Float32 weights keep float32 keys: the figure says so, and the comparison is still with 16 bits."""
    model = tiny("llama")

    found = cost.measure(model, build.plan_caches(model, plans(4, "fp16")))

    assert (found.effective, found.fp16) == (4 * 2 * 32 * 2 * 4, 4 * 2 * 32 * 2 * 2)
