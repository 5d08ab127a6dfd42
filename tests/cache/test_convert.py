from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from daemon.cache import build, calibrate, quantize_prompt_cache
from daemon.cache.latent import LatentCache
from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.errors import PolicyError
from daemon.policy.schemes import parse_scheme
from tests.cache.test_architectures import built, distance
from tests.policy.tiny_configs import tiny_config

PROMPT = [(i * 131 + 7) % 997 for i in range(120)]


def filled(model: Any, batch: int = 1) -> list[Any]:
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT[:-1]] * batch), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def decoded(model: Any, caches: Any, count: int = 10) -> list[int]:
    steps = generate_step(mx.array(PROMPT[-1:]), model, max_tokens=count, prompt_cache=caches)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("policy", ["turbo8v4", "balanced", {"mode": "turbo8v4"}])
def test_scheme_policy_and_kv_block_mean_the_same(tiny_llama: Any, policy: Any) -> None:
    cache = quantize_prompt_cache(tiny_llama, make_prompt_cache(tiny_llama), policy)

    assert [type(each) for each in cache] == [SequenceCache] * 4
    assert {each.row.scheme.name for each in cache} == {"turbo8v4"}
    assert cache.policy.summary == "turbo8v4 on 4 of 4 layers"
    assert cache.reasons == {}


def test_a_filled_cache_is_packed_and_the_given_one_stays(tiny_llama: Any) -> None:
    given = filled(tiny_llama)
    before = [mx.array(each.keys) for each in given]

    cache = quantize_prompt_cache(tiny_llama, given, "turbo8v4")

    assert [each.offset for each in cache] == [119] * 4
    assert cache[0].row.stored().packed_to == 64
    assert cache.nbytes < 0.5 * sum(each.nbytes for each in given)
    assert all(mx.array_equal(each.keys, keys) for each, keys in zip(given, before, strict=True))


def test_full_precision_decodes_what_mlx_lms_cache_decodes(tiny_llama: Any) -> None:
    """Layer rules of one layer make all of them ours; with fp16 elsewhere the tokens are the same."""
    given = filled(tiny_llama)
    block = {"mode": "fp16", "layers": [{"match": [3], "v": "int8", "sink_tokens": 512}]}

    cache = quantize_prompt_cache(tiny_llama, given, block)

    assert [each.row.scheme.name for each in cache] == ["fp16", "fp16", "fp16", "turbo0v8"]
    assert decoded(tiny_llama, cache) == decoded(tiny_llama, given)


def test_an_empty_cache_packed_first_equals_one_packed_later(tiny_llama: Any) -> None:
    """Where one prefill chunk holds the prompt, prefill is exact either way."""
    later = quantize_prompt_cache(tiny_llama, filled(tiny_llama), "turbo8v4")
    first = quantize_prompt_cache(tiny_llama, make_prompt_cache(tiny_llama), "turbo8v4")
    tiny_llama(mx.array([PROMPT[:-1]]), cache=first)

    assert decoded(tiny_llama, first) == decoded(tiny_llama, later)


def test_a_cache_of_several_sequences_becomes_rows(tiny_llama: Any) -> None:
    cache = quantize_prompt_cache(tiny_llama, filled(tiny_llama, batch=3), "turbo8v4")

    assert [type(each) for each in cache] == [BatchCache] * 4
    assert cache[0].offset.tolist() == [119] * 3
    logits = tiny_llama(mx.array([PROMPT[-1:]] * 3), cache=cache)
    alone = quantize_prompt_cache(tiny_llama, filled(tiny_llama), "turbo8v4")
    assert mx.allclose(logits[2], tiny_llama(mx.array([PROMPT[-1:]]), cache=alone)[0], atol=1e-4)


def test_a_copy_goes_its_own_way(tiny_llama: Any) -> None:
    """mlx-lm's prompt cache store deep-copies what it hands out."""
    cache = quantize_prompt_cache(tiny_llama, filled(tiny_llama), "turbo8v4")
    fork = copy.deepcopy(cache)

    expected = decoded(tiny_llama, fork)

    assert cache[0].offset == 119
    assert fork.policy == cache.policy
    assert decoded(tiny_llama, cache) == expected


@pytest.fixture(scope="module")
def tiny_gemma() -> Any:
    mx.random.seed(3)
    model = gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text", hidden_size=64, num_hidden_layers=4, intermediate_size=128, num_attention_heads=4,
            head_dim=32, rms_norm_eps=1e-5, vocab_size=997, num_key_value_heads=2, query_pre_attn_scalar=32,
            sliding_window=32, sliding_window_pattern=2,
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    return model


def test_what_cannot_be_packed_stays_and_says_why(tiny_gemma: Any) -> None:
    given = filled(tiny_gemma)

    cache = quantize_prompt_cache(tiny_gemma, given, "turbo8v4")

    kinds = [RotatingKVCache, SequenceCache] * 2
    assert [type(each) for each in cache] == kinds
    assert cache.reasons == {0: "sliding window", 2: "sliding window"}
    assert len(decoded(tiny_gemma, cache)) == 10
    assert [each.offset for each in given] == [119] * 4
    assert decoded(tiny_gemma, given) == decoded(tiny_gemma, filled(tiny_gemma))


def test_a_cache_of_another_kind_than_the_models_own_stays(tiny_llama: Any) -> None:
    windows = [RotatingKVCache(max_size=64, keep=4) for _ in tiny_llama.layers]

    cache = quantize_prompt_cache(tiny_llama, windows, "turbo8v4")

    assert [type(each) for each in cache] == [RotatingKVCache] * 4
    assert set(cache.reasons.values()) == {"the model keeps it in a RotatingKVCache"}
    assert cache.policy.summary == "fp16 on 4 of 4 layers; turbo8v4 was asked for"
    with pytest.raises(PolicyError, match="layer 0 falls back to fp16"):
        quantize_prompt_cache(tiny_llama, windows, {"mode": "turbo8v4", "strict": True})


def test_key_biases_of_the_checkpoint_are_taken_off(biased: Any) -> None:
    """Without them the keys of Qwen2's kind are mostly bias, and the bits are spent on it."""
    exact, packed = filled(biased), quantize_prompt_cache(biased, filled(biased), "int8")
    plain = build.convert(
        filled(biased), lambda _: Row(parse_scheme("int8"), sink_tokens=4, tail_tokens=32)
    )
    last = mx.array([PROMPT[-1:]])
    expected = biased(last, cache=exact)

    error = {
        name: distance(biased(last, cache=cache), expected)
        for name, cache in (("mean", packed), ("none", plain))
    }

    for each, layer in zip(packed, biased.layers, strict=True):
        assert mx.allclose(each.row.keys.mean.reshape(-1), layer.self_attn.k_proj.bias)
        assert each.row.statistics_id == "checkpoint"
    assert error["mean"] < error["none"] / 3


def test_keys_that_keep_their_mean_are_protected_at_the_ends(
    biased: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "checkpoint_means", lambda *_: {})

    cache = quantize_prompt_cache(biased, make_prompt_cache(biased), "turbo4v4", allowed="a test")

    assert {plan.effective.k.name for plan in cache.policy.layers} == {"int8"}


def test_keys_of_four_bits_need_a_reason(tiny_llama: Any) -> None:
    empty = make_prompt_cache(tiny_llama)

    careful = quantize_prompt_cache(tiny_llama, empty, "turbo4v4")
    allowed = quantize_prompt_cache(tiny_llama, empty, "turbo4v4", allowed="measured here")

    assert careful[0].row.scheme.name == "turbo0v4"
    assert "not allowed for llama" in careful.reasons[0]
    assert allowed[0].row.scheme.name == "turbo4v4"


def test_token_budgets_work_here_too(tiny_llama: Any) -> None:
    block = {"mode": "turbo8v4", "layers": [{"match": [2], "token_budget": 128}]}
    cache = quantize_prompt_cache(tiny_llama, filled(tiny_llama), block)

    decoded(tiny_llama, cache, count=60)

    assert [each.row.dropped for each in cache] == [0, 0, 64, 0]
    assert cache.reasons == {2: "keeps 128 tokens (lossy)"}


@pytest.mark.parametrize(
    ("policy", "path", "says"),
    [
        ("turbo8v9", "policy", '"turbo8v9" is neither a named policy (balanced, compact'),
        ({"mode": "turbo8v9"}, "mode", "unknown scheme"),
        ({"mod": "turbo8v4"}, "mod", "Extra inputs"),
        ({"policy": "mine"}, "policy", 'unknown policy "mine"'),
        ({"budget": "2GiB"}, "budget", "only a server of tqd does this"),
    ],
)
def test_a_policy_that_is_none_is_refused(
    tiny_llama: Any, policy: Any, path: str, says: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        quantize_prompt_cache(tiny_llama, make_prompt_cache(tiny_llama), policy)

    assert caught.value.path == path
    assert says in caught.value.message


def test_a_cache_of_another_model_or_packed_already_is_refused(tiny_llama: Any) -> None:
    with pytest.raises(ValueError, match="the cache has 3 parts and the model makes 4"):
        quantize_prompt_cache(tiny_llama, make_prompt_cache(tiny_llama)[:3], "turbo8v4")
    packed = quantize_prompt_cache(tiny_llama, make_prompt_cache(tiny_llama), "turbo8v4")
    with pytest.raises(ValueError, match="packed already"):
        quantize_prompt_cache(tiny_llama, packed, "turbo8v4")


def test_a_model_that_does_not_say_what_it_is_needs_its_config(tiny_llama: Any) -> None:
    class Wrapped:
        """A model behind someone else's class: it has layers and no arguments."""

        layers = tiny_llama.layers

        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            return tiny_llama(*args, **kwargs)

    empty = make_prompt_cache(Wrapped())
    with pytest.raises(PolicyError) as caught:
        quantize_prompt_cache(Wrapped(), empty, "turbo8v4")
    assert "config=" in str(caught.value.hint)

    config = {key: value for key, value in vars(tiny_llama.args).items() if value is not None}
    cache = quantize_prompt_cache(Wrapped(), empty, "turbo8v4", config=config)
    assert cache.policy.summary == "turbo8v4 on 4 of 4 layers"


@pytest.mark.parametrize(("family", "mode"), [("falcon_h1", "turbo8v4"), ("deepseek_v3", "int8")])
def test_filled_composites_and_latents_are_packed_and_go_on(family: str, mode: str) -> None:
    made = built(family)
    tokens = mx.array([[i * 7 % 96 for i in range(150)]])
    given = made.factory.stock()
    made.model(tokens[:, :149], cache=given)

    cache = quantize_prompt_cache(made.model, given, mode, config=tiny_config(family))

    parts = list(build.parts(cache))
    ours = [part for part in parts if isinstance(part, SequenceCache)]
    assert len(ours) == 6
    assert {isinstance(part, LatentCache) for part in ours} == {family == "deepseek_v3"}
    assert all(part.row.stored().packed_to for part in ours)
    packed, exact = (made.model(tokens[:, 149:], cache=caches)[0] for caches in (cache, given))
    assert 0 < distance(packed, exact) < 0.2
    with pytest.raises(ValueError, match="packed already"):
        quantize_prompt_cache(made.model, cache, mode, config=tiny_config(family))


def test_convert_packs_only_plain_growing_caches() -> None:
    def row(_: int) -> Row:
        return Row(parse_scheme("int8"), sink_tokens=4, tail_tokens=32)

    with pytest.raises(ValueError, match="cache 1 is a QuantizedKVCache"):
        build.convert([KVCache(), QuantizedKVCache()], row)


def test_importing_the_package_loads_no_mlx() -> None:
    code = "import sys, daemon.cache as c; c.quantize_prompt_cache; assert 'mlx' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.model
@pytest.mark.slow
def test_the_readmes_example_runs(
    demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The block of README.md as it stands there, with the demo model where it says."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        if "quantize_prompt_cache" in block
    )
    place = re.search(r'load\("(.+?)"\)', code)
    assert place is not None
    (tmp_path / place[1]).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place[1]).symlink_to(demo_model_path)
    monkeypatch.chdir(tmp_path)

    exec(compile(code, "README.md", "exec"), {})

    said = capsys.readouterr().out
    assert "Paris" in said
    assert "turbo8v4 on 30 of 30 layers" in said
