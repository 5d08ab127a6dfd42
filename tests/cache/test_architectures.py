"""Every family of mlx-lm on our caches: tiny, with random weights, compared with mlx-lm's own caches."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import CacheList, KVCache

from daemon.cache import build, calibrate
from daemon.cache.build import CacheFactory
from daemon.cache.latent import LatentCache
from daemon.cache.sequence import SequenceCache
from daemon.policy.architecture import Architecture, LayerKind, read_architecture
from daemon.policy.request import request
from daemon.policy.resolve import resolve
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.rules import Batching, architectures
from daemon.policy.spec import KvSpec
from daemon.policy.store import load_policies
from tests.policy.tiny_configs import NOT_BUILT, NOT_RUN, tiny_config

EXCLUDED = {**NOT_BUILT, **dict.fromkeys(NOT_RUN, "has a Metal kernel in its forward pass")}
FAMILIES = sorted(architectures().families.keys() - EXCLUDED.keys())
VOCAB = 96  # of tiny_config; phi3small has more and is given tokens below it all the same
PREFILL, CHUNK, DECODE = 96, 64, 3
PROMPTS = [[(7 * row + i * i) % VOCAB for i in range(n)] for row, n in enumerate((70, 21))]


@dataclass
class Built:
    """A tiny model and its caches under one policy."""

    model: Any
    arch: Architecture
    policy: ResolvedPolicy
    factory: CacheFactory

    @cached_property
    def exact(self) -> mx.array:
        """The logits on mlx-lm's own caches."""
        return logits(self.model, self.factory.stock())


def built(family: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> Built:
    """Build *family*, its configuration with *changes*, and plan its caches: turbo8v4, or int8 where latents grow."""
    config = tiny_config(family) | changes
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    model.update(tree_map(lambda array: alive(array, dtype), model.parameters()))
    mx.eval(model.parameters())
    arch = read_architecture(config)
    latent = any(layer.kind is LayerKind.LATENT for layer in arch.layers)
    mode = "int8" if latent else "turbo8v4"
    policy = resolve(request(KvSpec(mode=mode), load_policies().policies), arch, allowed="a test")
    own = [plan for plan in policy.layers if plan.kind is not LayerKind.SHARED]
    factory = build.probe(model, build.plan_caches(model, own, batching=arch.batching), VOCAB)
    return Built(model, arch, policy, factory)


def alive(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return *array* in *dtype*, with numbers where it starts at zero: gates, biases and sinks would hide mistakes."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if not mx.any(array).item():
        array = 0.3 * mx.random.normal(array.shape)
    return array.astype(dtype)


def logits(model: Any, caches: list[Any]) -> mx.array:
    """Return the logits of a prefill in two chunks and of some decode steps, (tokens, vocabulary)."""
    tokens = (mx.arange(PREFILL + DECODE)[None] * 7919 + 11) % VOCAB
    edges = [0, CHUNK, *range(PREFILL, PREFILL + DECODE + 1)]
    parts = [
        model(tokens[:, a:b], cache=caches)[0, :, :VOCAB] for a, b in itertools.pairwise(edges)
    ]
    out = mx.concatenate(parts, axis=0).astype(mx.float32)
    mx.eval(out)
    return out


def distance(got: mx.array, expected: mx.array) -> float:
    """Return the error of *got* relative to the size of *expected*."""
    return float((mx.linalg.norm(got - expected) / mx.linalg.norm(expected)).item())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Built]:
    yield built(request.param)
    mx.clear_cache()


def ours(cache: Any) -> list[SequenceCache]:
    """Return the caches of ours that *cache* is or holds."""
    parts = cache.caches if isinstance(cache, CacheList) else [cache]
    return [part for part in parts if isinstance(part, SequenceCache)]


def test_what_is_reported_is_what_is_built(family: Built) -> None:
    """A layer has the scheme that its plan says, or mlx-lm's own cache and a reason."""
    made, own = family.factory(), family.factory.stock()
    planned = {plan.index: plan for plan in family.policy.layers}

    for plan, cache, stock in zip(family.factory.plans, made, own, strict=True):
        assert plan == planned[plan.index]  # nothing fell back at load
        mine = ours(cache)
        assert {part.row.scheme for part in mine} == ({plan.effective} if mine else set())
        latent = plan.kind is LayerKind.LATENT
        assert all(isinstance(part, LatentCache) == latent for part in mine)
        if not mine:
            assert type(cache).__name__ == type(stock).__name__
            assert plan.reason
        elif isinstance(cache, CacheList):
            replaced = [type(part) is KVCache for part in stock.caches]
            assert [part in mine for part in cache.caches] == replaced


def test_layers_that_keep_every_token_are_packed_unless_the_rules_say_why(family: Built) -> None:
    for plan, layer in zip(family.policy.layers, family.arch.layers, strict=True):
        free = layer.kind is LayerKind.FULL and family.arch.stock_cache is None
        latent = layer.kind is LayerKind.LATENT and not layer.indexer_dim
        if free or (latent and family.arch.stock_cache is None):
            assert plan.effective.name == ("turbo8v0" if latent else "turbo8v4")
        elif layer.kind is not LayerKind.SHARED:
            assert plan.effective.name == "fp16"


def test_unpacked_logits_equal_mlx_lms(family: Built) -> None:
    assert mx.all(mx.isfinite(family.exact)).item()
    if family.factory.any_packed:
        got = logits(family.model, family.factory.unpacked())

        assert distance(got, family.exact) < 1e-5


def test_packed_logits_are_close_and_not_equal(family: Built) -> None:
    """Not equal: the packed tiles really were attended to."""
    if family.factory.any_packed:
        got = logits(family.model, family.factory())

        assert 1e-6 < distance(got, family.exact) < 0.25


def test_rows_of_a_ragged_batch_equal_solo_runs(
    family: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine runs the family: together, with one prompt at a time, or one sequence at a time."""
    monkeypatch.setattr(family.model, "make_cache", family.factory, raising=False)
    expected = [alone(family.model, family.factory(), prompt) for prompt in PROMPTS]

    got = together(family.model, family.arch.batching)

    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (_, mine), (_, solo) in zip(got, expected, strict=True):
        assert mx.allclose(mx.exp(mine), mx.exp(solo), atol=1e-4)


def alone(model: Any, caches: list[Any], prompt: list[int]) -> tuple[list[int], mx.array]:
    steps = generate_step(
        mx.array(prompt), model, max_tokens=DECODE, prompt_cache=caches, prefill_step_size=32
    )
    tokens, logprobs = zip(*steps, strict=True)
    return [int(token) for token in tokens], mx.stack(list(logprobs))


def together(model: Any, batching: Batching) -> list[tuple[list[int], mx.array]]:
    generator = BatchGenerator(
        model,
        completion_batch_size=1 if batching == "alone" else 8,
        prefill_batch_size=8 if batching == "rows" else 1,
        prefill_step_size=32,
        stream=mx.default_stream(mx.default_device()),
    )
    uids = generator.insert(PROMPTS, max_tokens=[DECODE] * len(PROMPTS))
    answers: dict[int, list[Any]] = {uid: [] for uid in uids}
    while min(map(len, answers.values())) < DECODE:
        for response in generator.next()[1]:
            answers[response.uid].append(response)
    return [
        (
            [response.token for response in answers[uid]],
            mx.stack([r.logprobs for r in answers[uid]]),
        )
        for uid in uids
    ]


@pytest.mark.parametrize(
    "name",
    ["afm7", "deepseek_v2", "falcon_h1", "gemma3n", "gpt_oss", "iquestloopcoder", "nanbeige"],
)
def test_packed_layers_can_be_calibrated_wherever_their_cache_stands(name: str) -> None:
    """In a composite, read by other layers, in a loop: statistics for all, as long as their keys."""
    made = built(name)
    text = [(31 * i * i + 7 * i) % VOCAB for i in range(460)]

    statistics = calibrate.calibrate(made.model, made.factory, [text])

    assert statistics.keys() == {i for i, slot in enumerate(made.factory.slots) if slot.packed}
    for index, entry in statistics.items():
        layer = made.arch.layers[made.factory.plans[index].index]
        assert entry.scale.shape == (layer.n_kv_heads, layer.head_dim_k)
        assert mx.all(mx.isfinite(entry.scale)).item()


def test_latents_need_no_calibration() -> None:
    factory = built("deepseek_v3").factory

    assert factory.any_packed
    assert not factory.any_scaled_keys
