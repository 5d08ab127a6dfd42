from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from daemon.cache import build, calibrate, profile
from daemon.cache.build import CacheFactory
from daemon.cache.calibrate import KeyStatistics
from daemon.cache.profile import Profile, ProfileError
from daemon.policy.architecture import LayerKind
from daemon.policy.resolved import LayerPlan
from daemon.policy.schemes import parse_scheme
from tests.cache.test_architectures import built, distance, logits

TOKENS = [(i * i * 31 + i * 7) % 997 for i in range(600)]


def factory_of(model: Any, scheme: str = "turbo4v4") -> CacheFactory:
    plans = [
        LayerPlan(
            index, LayerKind.FULL, scheme, parse_scheme(scheme), sink_tokens=4, tail_tokens=32
        )
        for index in range(len(model.layers))
    ]
    return build.plan_caches(model, plans)


def test_the_mean_is_that_of_keys_before_rotary_embedding(biased: Any) -> None:
    """Checked against the projections themselves: layer 0's input is the normed embedding."""
    statistics = calibrate.calibrate(biased, factory_of(biased), [TOKENS])

    layer = biased.layers[0]
    hidden = layer.input_layernorm(biased.model.embed_tokens(mx.array(TOKENS)[None]))
    keys = layer.self_attn.k_proj(hidden)[0, calibrate.SKIP_KEYS :].reshape(-1, 2, 32)
    mean = statistics[0].mean
    assert mean is not None
    assert mx.allclose(mean, keys.mean(axis=0), atol=1e-3)


def test_scales_have_geometric_mean_one_and_bounds() -> None:
    keys = mx.array([[1e-8, 1.0, 100.0, 1e6]])
    queries = mx.array([[1.0, 1.0, 0.0, 1e-6]])

    scale = calibrate.key_scale(keys, queries)

    assert np.exp(np.log(np.array(scale)).mean()) == pytest.approx(1, rel=1e-4)
    ratio = float((mx.max(scale) / mx.min(scale)).item())  # type: ignore[arg-type]
    assert ratio <= calibrate.SCALE_LIMIT**2 * 1.01
    assert mx.all(mx.isfinite(scale))


@pytest.mark.parametrize("keys", [[0.0, 4.0], [0.0, 0.0]])
@pytest.mark.parametrize("queries", [[0.0, 1.0], [0.0, 0.0]])
def test_channels_and_heads_that_are_exactly_zero_give_finite_scales(
    keys: list[float], queries: list[float]
) -> None:
    """Some models have them in keys and queries alike."""
    scale = calibrate.key_scale(mx.array([keys]), mx.array([queries]))

    assert mx.all(mx.isfinite(scale))
    assert mx.all(scale > 0)


def divergence_of(model: Any, factory: CacheFactory) -> float:
    """Return the squared error of decode logits against the unpacked cache, relative."""
    outs = []
    for caches in (factory.unpacked(), factory()):
        model(mx.array([TOKENS[:300]]), cache=caches)
        outs.append(
            mx.concatenate(
                [model(mx.array([[token]]), cache=caches) for token in TOKENS[300:330]], axis=1
            )
        )
    exact, packed = outs
    return float((mx.sum((packed - exact) ** 2) / mx.sum(exact**2)).item())  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["int8", "turbo4v4", "turbo3v3"])
def test_each_lever_changes_the_output_and_helps_a_biased_model(biased: Any, scheme: str) -> None:
    plain = factory_of(biased, scheme)
    statistics = calibrate.calibrate(biased, plain, [TOKENS])
    means = {i: KeyStatistics(mx.ones_like(s.scale), s.mean) for i, s in statistics.items()}
    scales = {i: KeyStatistics(s.scale, None) for i, s in statistics.items()}

    error = {
        name: divergence_of(
            biased, plain.calibrated(calibrate.attach(biased, plain, entries), name)
        )
        for name, entries in {
            "none": {},
            "scale": scales,
            "mean": means,
            "both": statistics,
        }.items()
    }

    assert len(set(error.values())) == 4
    assert error["mean"] < error["none"] / 3
    assert error["both"] < error["none"] / 3


def test_key_biases_of_the_checkpoint_stand_in_for_a_measurement(
    biased: Any, tiny_llama: Any
) -> None:
    plain = factory_of(biased)
    means = calibrate.checkpoint_means(biased, plain, {0: 32, 1: 32})

    assert means.keys() == {0, 1}
    assert means[0].mean is not None
    assert mx.allclose(means[0].mean.reshape(-1), biased.layers[0].self_attn.k_proj.bias)
    calibrated = plain.calibrated(calibrate.attach(biased, plain, means), "checkpoint")
    assert divergence_of(biased, calibrated) < divergence_of(biased, plain) / 3
    assert (
        calibrate.checkpoint_means(tiny_llama, factory_of(tiny_llama), dict.fromkeys(range(4), 32))
        == {}
    )


def test_rows_of_a_batch_use_their_own_positions(biased: Any) -> None:
    """The mean rotates with each row's own position, not with the batch's longest."""
    from daemon.cache.sequence import SequenceCache

    plain = factory_of(biased)
    factory = plain.calibrated(
        calibrate.attach(biased, plain, calibrate.calibrate(biased, plain, [TOKENS])), "id"
    )
    rows = []
    for count in (200, 90):
        caches = factory()
        biased(mx.array([TOKENS[:count]]), cache=caches)
        rows.append(caches)
    batch = [SequenceCache.merge([row[layer] for row in rows]) for layer in range(2)]
    alone = [[SequenceCache(row[layer].row.copy()) for layer in range(2)] for row in rows]

    for token in TOKENS[:5]:
        together = biased(mx.array([[token], [token]]), cache=batch)
        for index in range(2):
            assert mx.allclose(
                together[index], biased(mx.array([[token]]), cache=alone[index])[0], atol=1e-3
            )


def test_the_model_runs_on_as_before_after_being_watched(tiny_llama: Any) -> None:
    tokens = mx.array([TOKENS[:20]])
    before = tiny_llama(tokens)
    kinds = {type(module): type(module).__call__ for module in tiny_llama.modules()}

    calibrate.calibrate(tiny_llama, factory_of(tiny_llama), [TOKENS])

    assert mx.array_equal(tiny_llama(tokens), before)
    assert {kind: kind.__call__ for kind in kinds} == kinds


@pytest.mark.parametrize("family", ["smollm3", "gpt2"])
def test_keys_without_rotary_embedding_lose_their_mean_too(family: str) -> None:
    """smollm3 has such a layer among others, gpt2 no other; their mean is the same at every position."""
    one = built(family)
    tokens = [token % 96 for token in TOKENS[:500]]  # gpt2 has 512 positions
    statistics = calibrate.calibrate(one.model, one.factory, [tokens])
    still = {index for index, entry in statistics.items() if entry.constant}

    assert still == {"smollm3": {3}, "gpt2": set(range(6))}[family]
    caches = make_prompt_cache(one.model)
    one.model(mx.array([tokens]), cache=caches)
    for index in still:
        keys = caches[index].keys_and_values()[0][0, :, calibrate.SKIP_KEYS :]
        assert mx.allclose(statistics[index].mean, mx.mean(keys, axis=1), atol=1e-4)

    transforms = calibrate.attach(one.model, one.factory, statistics)
    assert all(transforms[index].mean is not None for index in statistics)
    assert {index for index, it in transforms.items() if it.rotary is None} == still
    calibrated, exact = (
        logits(one.model, made)
        for made in (one.factory.calibrated(transforms, "id")(), one.factory.unpacked())
    )
    assert 1e-6 < distance(calibrated, exact) < 0.1


def test_progress_may_end_it(tiny_llama: Any) -> None:
    def stop(share: float) -> None:
        raise TimeoutError(f"at {share}")

    with pytest.raises(TimeoutError):
        calibrate.calibrate(tiny_llama, factory_of(tiny_llama), [TOKENS], stop)
    assert "watch" not in type(tiny_llama.layers[0].self_attn.rope).__call__.__qualname__


def test_too_little_text_is_refused(tiny_llama: Any) -> None:
    with pytest.raises(ValueError, match="at least 448 tokens"):
        calibrate.calibrate(tiny_llama, factory_of(tiny_llama), [TOKENS[:100]])


@pytest.fixture
def made(tmp_path: Path) -> tuple[Profile, Path]:
    scale = mx.random.uniform(0.5, 2.0, (2, 32), key=mx.random.key(1))
    entries = {
        0: KeyStatistics(scale, scale * 3),
        3: KeyStatistics(scale * 2, scale, constant=True, note="no rotary module"),
    }
    saved = Profile("abc", "a text", 3072, entries)
    path = tmp_path / "profiles" / "abc.safetensors"
    saved.save(path)
    return saved, path


def test_a_profile_comes_back_as_it_was_saved(made: tuple[Profile, Path]) -> None:
    saved, path = made

    back = profile.load(path, "abc")

    assert (back.id, back.text, back.tokens) == (saved.id, "a text", 3072)
    assert back.statistics[3].constant
    assert back.statistics[3].note == "no rotary module"
    assert not back.statistics[0].constant
    assert mx.array_equal(back.statistics[0].scale, saved.statistics[0].scale)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_profile_of_another_model_is_refused(made: tuple[Profile, Path]) -> None:
    with pytest.raises(ProfileError, match="another model"):
        profile.load(made[1], "xyz")


def test_a_mean_that_rotates_and_one_that_does_not_have_different_names(
    made: tuple[Profile, Path],
) -> None:
    saved, _ = made
    turned = {i: dataclasses.replace(it, constant=True) for i, it in saved.statistics.items()}

    assert dataclasses.replace(saved, statistics=turned).id != saved.id


@pytest.mark.parametrize("lost", ["slots", "fingerprint", "tokens", "id"])
def test_a_profile_that_does_not_say_everything_is_refused(
    made: tuple[Profile, Path], lost: str
) -> None:
    path = made[1]
    arrays, about = mx.load(str(path), return_metadata=True)
    del about[lost]
    mx.save_safetensors(str(path), arrays, metadata=about)

    with pytest.raises(ProfileError):
        profile.load(path, None)


@pytest.mark.parametrize("damage", ["missing", "truncated", "other", "changed"])
def test_a_damaged_profile_is_refused(made: tuple[Profile, Path], damage: str) -> None:
    path = made[1]
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "other":
        mx.save_safetensors(str(path), {"x": mx.zeros(3)})
    else:
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)

    with pytest.raises(ProfileError):
        profile.load(path, "abc")
