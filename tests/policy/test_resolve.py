from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.errors import PolicyError
from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.evidence import allowance
from daemon.policy.request import request
from daemon.policy.resolve import resolve, rotation
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.rules import AllowEntry
from daemon.policy.spec import KvRequest, KvSpec, LayerRule, NamedPolicy
from daemon.policy.store import load_allowlist

Arch = Callable[[str], Architecture]
Plain = Callable[..., Architecture]
Policies = dict[str, NamedPolicy]


class TestRequest:
    def test_an_empty_block_is_the_balanced_policy(self, policies: Policies) -> None:
        assert request(KvSpec(), policies) == KvRequest(
            policy="balanced", k="int8", v="turbo4", explicit=False, boundary_v=0, boundary_mode="int8",
            boundary_k="auto", sink_tokens=4, tail_tokens=32, strict=False,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("keys", "k", "v"),
        [
            ({"policy": "small"}, "turbo4", "turbo3"),
            ({"mode": "turbo8v3"}, "int8", "turbo3"),
            ({"mode": "fp16+turbo4"}, "fp16", "turbo4"),
            ({"k": "fp16"}, "fp16", "turbo4"),
            ({"v": "turbo2"}, "int8", "turbo2"),
            ({"mode": "fp16", "v": "turbo4"}, "fp16", "turbo4"),
            (
                {"mode": "fp16", "k": "int8", "v": "int8", "cache_type_k": "turbo4"},
                "turbo4",
                "int8",
            ),
            ({"cache_type_k": "turbo4-asym", "cache_type_v": "turbo4-asym"}, "fp16", "turbo4"),
        ],
    )
    def test_cache_type_wins_over_k_and_v_over_mode_over_policy(
        self, keys: dict[str, Any], k: str, v: str, policies: Policies
    ) -> None:
        asked = request(KvSpec(**keys), policies)
        assert (asked.k, asked.v) == (k, v)
        assert asked.explicit == (keys.keys() != {"policy"})

    @pytest.mark.parametrize(
        ("keys", "warning"),
        [
            ({"cache_type_k": "int8", "mode": "fp16"}, 'cache_type_k "int8" wins over mode "fp16"'),
            ({"cache_type_v": "int8", "v": "turbo4"}, 'cache_type_v "int8" wins over v "turbo4"'),
            ({"mode": "fp16", "k": "int8", "v": "int8"}, 'mode "fp16" has no effect'),
            ({"mode": "turbo3"}, "turbo3 means turbo0v3 here"),
            ({"mode": "turbo3.5"}, "turbo3.5 means turbo3v4 here"),
            ({"boundary_v": 2}, "boundary_mode: fp16"),
        ],
    )
    def test_what_has_no_effect_or_two_meanings_is_told(
        self, keys: dict[str, Any], warning: str, policies: Policies
    ) -> None:
        (told,) = request(KvSpec(**keys), policies).warnings
        assert warning in told

    @pytest.mark.parametrize(
        ("keys", "tail", "fold"),
        [
            ({}, 32, 32),
            ({"mode": "turbo4-delegated"}, 256, 128),
            ({"mode": "turbo4-delegated", "tail_tokens": 64}, 64, 128),
            ({"mode": "turbo4-delegated", "fold_tokens": 64}, 256, 64),
            ({"mode": "turbo4-delegated", "k": "int8"}, 256, 128),
            ({"mode": "turbo4-delegated", "k": "int8", "v": "int8"}, 32, 32),
            ({"cache_type_v": "turbo4-delegated"}, 256, 128),
            ({"fold_tokens": 96}, 32, 96),
        ],
    )
    def test_a_delegated_scheme_brings_its_window_unless_one_is_written(
        self, keys: dict[str, Any], tail: int, fold: int, policies: Policies
    ) -> None:
        asked = request(KvSpec(**keys), policies)
        assert (asked.tail_tokens, asked.fold_tokens) == (tail, fold)

    def test_the_window_of_a_policy_goes_with_its_scheme(self, policies: Policies) -> None:
        delegated = policies["exact"].model_copy(update={"mode": "turbo4-delegated"})
        written = delegated.model_copy(update={"tail_tokens": 64})
        for policy, mode, window in (
            (delegated, None, (256, 128)),
            (delegated, "turbo8v4", (32, 32)),
            (written, None, (64, 128)),
            (written, "turbo8v4", (64, 32)),
        ):
            asked = request(KvSpec(policy="mine", mode=mode), {"mine": policy})
            assert (asked.tail_tokens, asked.fold_tokens) == window

    def test_a_cache_type_alone_overrides_nothing_worth_a_warning(self, policies: Policies) -> None:
        assert request(KvSpec(cache_type_k="int8"), policies).warnings == ()

    def test_rules_of_a_server_replace_those_of_its_policy(self, policies: Policies) -> None:
        ruled = policies["exact"].model_copy(
            update={"layers": (LayerRule(match="all", mode="int8"),)}
        )
        assert request(KvSpec(policy="mine"), {"mine": ruled}).layers == ruled.layers
        assert request(KvSpec(policy="mine", layers=()), {"mine": ruled}).layers == ()

    @pytest.mark.parametrize(
        ("keys", "path", "hint"),
        [
            ({"policy": "blanced"}, "policy", 'did you mean "balanced"?'),
            ({"mode": "turbo4v5"}, "mode", "one of"),
            ({"v": "turbo5"}, "v", "one of"),
            ({"k": "affine8"}, "k", "mode: affine8"),
            ({"mode": "affine4", "v": "int8"}, "v", "mode: affine4"),
            ({"mode": "affine4", "cache_type_v": "int8"}, "cache_type_v", "mode: affine4"),
            ({"fold_tokens": 48}, "fold_tokens", "write 32 or 64"),
            (
                {"layers": (LayerRule(match="all", fold_tokens=72),)},
                "layers.0.fold_tokens",
                "write 64 or 96",
            ),
            ({"mode": "q8_0"}, "mode", "nearest scheme is int8"),
            ({"k": "q4_0"}, "k", "turbo4"),
            ({"v": "bogus"}, "v", "one of"),
            ({"cache_type_k": "q8_0"}, "cache_type_k", "one of"),
            ({"cache_type_v": "turbo4-everywhere"}, "cache_type_v", "one of"),
            ({"tail_tokens": 16}, "tail_tokens", "write 0 or 32"),
            ({"layers": (LayerRule(match="0-3", mode="bogus"),)}, "layers.0.mode", "one of"),
        ],
    )
    def test_a_wrong_value_is_named_by_its_path_with_what_to_write(
        self, keys: dict[str, Any], path: str, hint: str, policies: Policies
    ) -> None:
        with pytest.raises(PolicyError) as caught:
            request(KvSpec(**keys), policies)
        assert caught.value.path == path
        assert hint in str(caught.value.hint)


Resolved = Callable[..., ResolvedPolicy]


def effective(policy: ResolvedPolicy) -> list[str]:
    return [plan.effective.name for plan in policy.layers]


class TestArchitectureRules:
    def test_a_plain_model_gets_what_was_asked(self, resolved: Resolved, arch: Arch) -> None:
        policy = resolved(arch("llama"))
        assert policy.summary == "turbo8v4 on 32 of 32 layers"
        assert policy.warnings == ()
        (group,) = policy.groups()
        assert (group.first, group.last, group.requested, group.reason) == (
            0,
            31,
            "turbo8v4",
            None,
        )

    @pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
    @pytest.mark.parametrize("asked", [{"policy": "quality"}, {"mode": "turbo8v4"}])
    def test_latent_attention_stays_fp16_with_one_warning(
        self, asked: dict[str, str], name: str, resolved: Resolved, arch: Arch
    ) -> None:
        """Also where the named policy is int8: only who writes int8 for this model gets it."""
        policy = resolved(arch(name), **asked)
        assert set(effective(policy)) == {"fp16"}
        (warning,) = policy.warnings
        assert warning.startswith(f"{name} has latent attention (MLA): ")
        assert warning.endswith(" becomes fp16 there; mode: int8 packs the latents")

    @pytest.mark.parametrize(
        "asked", [{"mode": "int8"}, {"layers": (LayerRule(match="all", mode="int8"),)}]
    )
    def test_latents_are_packed_in_int8_where_that_is_written(
        self, asked: dict[str, Any], resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch("deepseek_v3"), strict=True, **asked)
        assert policy.summary == "turbo8v0 on 61 of 61 layers"
        assert policy.warnings == ()
        plan = policy.layers[0]
        assert (plan.requested, plan.sink_tokens, plan.tail_tokens) == ("int8", 4, 32)
        assert plan.reason == "int8 latent; the rotary key stays in full precision"

    def test_a_rule_packs_the_latents_of_some_layers(self, resolved: Resolved, arch: Arch) -> None:
        policy = resolved(arch("deepseek_v3"), layers=(LayerRule(match="0-9", mode="int8"),))
        assert effective(policy) == ["turbo8v0"] * 10 + ["fp16"] * 51

    def test_latents_that_are_gathered_by_index_stay_fp16(
        self, resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch("deepseek_v32"), mode="int8")
        assert set(effective(policy)) == {"fp16"}
        assert policy.layers[0].reason == "sparse attention reads single latents by their index"
        assert policy.warnings == (
            "deepseek_v32 has latent attention (MLA): int8 becomes fp16 there",
        )

    def test_expanded_latent_attention_may_be_quantized(
        self, resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch("deepseek_v2"))
        assert policy.effective_counts == {"turbo8v4": 32}
        assert policy.layers[0].rotation == "hadamard"  # 192 = 12 * 16 and 128

    def test_sliding_layers_stay_fp16_with_their_reason(
        self, resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch("gpt_oss"))
        assert policy.summary == "turbo8v4 on 18 of 36 layers; 18 sliding fp16"
        assert policy.layers[0].reason == "sliding window"
        assert policy.layers[1].reason is None

    def test_a_rule_for_sliding_layers_is_told_what_is_missing(
        self, resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch("gpt_oss"), layers=(LayerRule(match="sliding", mode="turbo8v4"),))
        assert policy.layers[0].effective.name == "fp16"
        assert "quantized rotating caches are not available yet" in str(policy.layers[0].reason)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("llama4", "chunked attention"), ("jamba", "recurrent state, no KV cache")],
    )
    def test_chunked_and_recurrent_layers_are_left_alone(
        self, name: str, reason: str, resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch(name))
        assert policy.layers[0].effective.name == "fp16"
        assert policy.layers[0].reason == reason
        assert "turbo8v4" in effective(policy)

    def test_a_family_with_its_own_attention_keeps_its_cache(
        self, resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch("gemma2"))
        assert policy.summary == "fp16 on 26 of 26 layers; turbo8v4 was asked for"
        assert policy.layers[0].reason == arch("gemma2").stock_cache
        assert len(policy.warnings) == 1

    def test_a_shared_layer_has_the_scheme_of_the_cache_it_reads(
        self, resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch("gemma3n"))
        by_source = {plan.reason: plan.effective.name for plan in policy.layers[20:]}
        assert by_source == {
            "reads the cache of layer 18": "fp16",
            "reads the cache of layer 19": "turbo8v4",
        }
        assert policy.effective_counts == {"fp16": 16, "turbo8v4": 4}
        assert policy.summary.endswith("15 read another layer's cache")

    @pytest.mark.parametrize(
        ("name", "told"), [("jamba", True), ("mamba2", True), ("gpt_oss", False)]
    )
    def test_little_to_gain_is_told(
        self, name: str, told: bool, resolved: Resolved, arch: Arch
    ) -> None:
        assert any("saves little" in w for w in resolved(arch(name)).warnings) is told

    @pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "mamba2", "gemma3n"])
    def test_an_fp16_policy_falls_back_nowhere(
        self, name: str, resolved: Resolved, arch: Arch
    ) -> None:
        policy = resolved(arch(name), policy="exact", strict=True)
        assert policy.warnings == ()
        assert policy.effective_counts.keys() == {"fp16"}
        assert policy.summary.startswith("fp16 on ")

    def test_full_precision_has_no_sinks_tail_or_rotation(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        fixed, packed = resolved(plain("sf")).layers
        assert (fixed.sink_tokens, fixed.tail_tokens, fixed.rotation) == (0, 0, None)
        assert (packed.sink_tokens, packed.tail_tokens, packed.rotation) == (4, 32, "hadamard")


class TestAffine:
    @pytest.mark.parametrize("name", ["affine8", "affine4"])
    def test_it_is_not_rotated(self, name: str, resolved: Resolved, plain: Plain) -> None:
        (plan,) = resolved(plain("f"), allowed="a test", mode=name).layers
        assert (plan.effective.name, plan.reason, plan.rotation) == (name, None, None)

    def test_vectors_without_groups_get_int8_with_the_reason(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        arch = plain("f")
        arch = replace(arch, layers=(replace(arch.layers[0], head_dim_v=80),))
        (plan,) = resolved(arch, allowed="a test", mode="affine4").layers
        assert plan.effective.name == "int8"
        assert plan.reason == "affine4 stores groups of 32: head_dim 80 does not divide into them"
        with pytest.raises(PolicyError, match="affine4 becomes int8"):
            resolved(arch, allowed="a test", mode="affine4", strict=True)

    def test_boundary_layers_leave_it_whole(self, resolved: Resolved, plain: Plain) -> None:
        policy = resolved(plain("ffff"), mode="affine8", boundary_v=1, boundary_mode="fp16")
        assert effective(policy) == ["affine8"] * 4

    def test_where_4_bit_keys_are_not_allowed_nothing_affine_is_left(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        assert effective(resolved(plain("f"), mode="affine4")) == ["turbo0v4"]

    def test_a_named_policy_of_it_becomes_turbo8v4_there(
        self, policies: Policies, plain: Plain
    ) -> None:
        mine = {"mine": policies["exact"].model_copy(update={"mode": "affine4"})}
        asked = request(KvSpec(policy="mine"), mine)
        assert effective(resolve(asked, plain("f"), allowed=None)) == ["turbo8v4"]

    def test_a_rule_that_tears_it_apart_is_refused(self, resolved: Resolved, plain: Plain) -> None:
        with pytest.raises(PolicyError) as caught:
            resolved(plain("ff"), mode="affine8", layers=(LayerRule(match=[1], v="turbo4"),))
        assert caught.value.path == "layers.0"
        assert "affine8 keys with turbo4 values are no scheme" in str(caught.value)


def test_a_rule_may_delegate_some_layers(resolved: Resolved, plain: Plain) -> None:
    first, second = resolved(
        plain("ff"), layers=(LayerRule(match=[1], mode="turbo4-delegated", fold_tokens=64),)
    ).layers
    assert (first.effective.name, first.tail_tokens, first.fold_tokens) == ("turbo8v4", 32, 32)
    assert (second.effective.name, second.tail_tokens, second.fold_tokens) == ("turbo0v4", 256, 64)


class TestAllowlist:
    def test_an_explicit_mode_becomes_turbo0v4(self, resolved: Resolved, plain: Plain) -> None:
        policy = resolved(plain("ff"), mode="turbo3v3")
        assert effective(policy) == ["turbo0v4", "turbo0v4"]
        (warning,) = policy.warnings
        assert "turbo3v3 becomes turbo0v4" in warning
        assert "not allowed for llama" in str(policy.layers[0].reason)

    def test_values_never_get_fewer_bits_than_were_asked(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        assert effective(resolved(plain("f"), mode="turbo4v8")) == ["turbo0v8"]

    @pytest.mark.parametrize(
        ("policy", "scheme"),
        [("compact", "turbo8v4"), ("small", "turbo8v3"), ("extreme", "turbo8v3")],
    )
    def test_a_named_policy_keeps_its_values_and_gets_8_bit_keys(
        self, policy: str, scheme: str, resolved: Resolved, plain: Plain
    ) -> None:
        assert effective(resolved(plain("f"), policy=policy)) == [scheme]

    def test_a_rule_counts_as_explicit(self, resolved: Resolved, plain: Plain) -> None:
        policy = resolved(plain("ff"), layers=(LayerRule(match=[1], mode="turbo4v4"),))
        assert effective(policy) == ["turbo8v4", "turbo0v4"]

    def test_an_allowed_model_gets_it_and_the_evidence_is_told(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        policy = resolved(plain("f"), allowed="measured: KLD .0013", mode="turbo4")
        assert effective(policy) == ["turbo4v4"]
        assert policy.warnings == ("keys at 4 bits or fewer are allowed here: measured: KLD .0013",)

    def test_8_bit_keys_need_no_allowance(self, resolved: Resolved, plain: Plain) -> None:
        assert resolved(plain("f"), mode="turbo8v2").warnings == ()


class TestAllowance:
    ENTRIES = (
        AllowEntry(model_type="qwen3_5", evidence="family"),
        AllowEntry(fingerprint="abc", evidence="this model"),
    )

    @pytest.mark.parametrize(
        ("model_type", "fingerprint", "evidence"),
        [
            ("qwen3_5_moe", None, "family"),
            ("llama", None, None),
            ("llama", "abc", "this model"),
            ("qwen3_5", "abc", "this model"),
            ("llama", "abcd", None),
        ],
    )
    def test_a_prefix_or_an_exact_fingerprint_allows(
        self, model_type: str, fingerprint: str | None, evidence: str | None
    ) -> None:
        assert allowance(model_type, self.ENTRIES, fingerprint=fingerprint) == evidence

    def test_the_shipped_list_allows_the_published_families_only(self, arch: Arch) -> None:
        entries = load_allowlist()
        for name in ("qwen3_5", "qwen3_next"):
            assert "not measured" in str(allowance(arch(name).model_type, entries))
        for name in ("qwen3", "qwen2", "llama"):
            assert allowance(arch(name).model_type, entries) is None


class TestLayerRules:
    def test_later_rules_win_key_by_key(self, resolved: Resolved, plain: Plain) -> None:
        rules = (
            LayerRule(match="all", mode="int8", sink_tokens=8),
            LayerRule(match="1-2", v="turbo4", tail_tokens=64),
            LayerRule(match=[2], k="fp16"),
        )
        policy = resolved(plain("fff"), layers=rules)
        assert effective(policy) == ["int8", "turbo8v4", "turbo0v4"]
        assert [(p.sink_tokens, p.tail_tokens) for p in policy.layers] == [
            (8, 32),
            (8, 64),
            (8, 64),
        ]

    def test_layers_that_differ_in_their_tail_are_two_groups(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        policy = resolved(plain("ffff"), layers=(LayerRule(match="2-3", tail_tokens=64),))
        assert [(g.first, g.last) for g in policy.groups()] == [(0, 1), (2, 3)]

    def test_a_rule_without_effect_is_told(self, resolved: Resolved, plain: Plain) -> None:
        policy = resolved(plain("rff"), layers=(LayerRule(match=[0], mode="int8"),))
        assert "layers.0 has no effect: its layers hold no KV cache of their own" in policy.warnings

    def test_no_match_is_an_error(self, resolved: Resolved, plain: Plain) -> None:
        with pytest.raises(PolicyError) as caught:
            resolved(plain("ff"), layers=(LayerRule(match="sliding", mode="fp16"),))
        assert caught.value.path == "layers.0.match"


class TestBoundaries:
    def test_boundaries_count_attention_layers_by_rank(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        """The first and last layers of a hybrid are recurrent: their index says nothing."""
        policy = resolved(plain("rfrfrfrfr"), boundary_v=1, boundary_mode="int8")
        assert [p.index for p in policy.layers if p.boundary] == [1, 7]
        assert policy.summary == (
            "turbo8v4 on 2 of 9 layers; 2 boundary layers V int8; 5 recurrent fp16"
        )

    def test_too_many_boundary_layers_are_clamped_and_told(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        policy = resolved(plain("fffff"), boundary_v=9, boundary_mode="fp16")
        assert effective(policy) == ["turbo8v0", "turbo8v0", "turbo8v4", "turbo8v0", "turbo8v0"]
        assert policy.warnings == (
            "boundary_v: 9 layers at each end are more than half of 5; 2 used",
        )

    def test_auto_protects_keys_only_where_the_family_asks_and_their_mean_is_unknown(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        kv = {"allowed": "measured", "mode": "turbo4v4", "key_means": False}
        assert effective(resolved(plain("ffff", boundary_k=1), **kv)) == [
            "turbo8v4", "turbo4v4", "turbo4v4", "turbo8v4",
        ]  # fmt: skip
        assert set(effective(resolved(plain("ffff"), **kv))) == {"turbo4v4"}
        assert set(effective(resolved(plain("ffff", boundary_k=1), **kv, boundary_k=0))) == {
            "turbo4v4"
        }
        known = {**kv, "key_means": True}
        assert set(effective(resolved(plain("ffff", boundary_k=1), **known))) == {"turbo4v4"}

    def test_a_boundary_is_no_fallback(self, resolved: Resolved, plain: Plain) -> None:
        policy = resolved(plain("ffff"), boundary_v=1, boundary_mode="int8", strict=True)
        assert policy.layers[0].reason == "boundary layer: V int8"


class TestStrict:
    def test_each_group_that_would_fall_back_is_listed(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        with pytest.raises(PolicyError) as caught:
            resolved(plain("ssfss"), strict=True)
        assert caught.value.path == "strict"
        assert caught.value.message.splitlines() == [
            "4 layers cannot have the scheme they are asked to have",
            "  layers 0-1 (sliding): turbo8v4 becomes fp16: sliding window",
            "  layers 3-4 (sliding): turbo8v4 becomes fp16: sliding window",
        ]

    def test_a_rule_that_asks_for_fp16_satisfies_it(self, resolved: Resolved, plain: Plain) -> None:
        policy = resolved(
            plain("ssf"), strict=True, layers=(LayerRule(match="sliding", mode="fp16"),)
        )
        assert effective(policy) == ["fp16", "fp16", "turbo8v4"]

    def test_a_recurrent_layer_is_no_fallback(self, resolved: Resolved, arch: Arch) -> None:
        """There is no cache to quantize: strict must not refuse every hybrid model."""
        assert resolved(arch("qwen3_5"), strict=True).effective_counts["turbo8v4"] == 8

    def test_keys_that_are_not_allowed_are_a_fallback(
        self, resolved: Resolved, plain: Plain
    ) -> None:
        with pytest.raises(PolicyError, match="turbo4v4 becomes turbo0v4"):
            resolved(plain("f"), mode="turbo4v4", strict=True)


class TestRotation:
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 224, 256, 512])
    def test_m_times_a_power_of_two_is_hadamard(self, head_dim: int) -> None:
        assert rotation(head_dim) == "hadamard"

    @pytest.mark.parametrize("head_dim", [36, 72, 100, 120, 144, 288, 576])
    def test_other_lengths_are_dense(self, head_dim: int) -> None:
        assert rotation(head_dim) == "dense"

    def test_sides_that_differ_are_both_told(self, resolved: Resolved, arch: Arch) -> None:
        """deepseek_v2 with an odd rotary part: keys of 200, values of 128."""
        odd = arch("deepseek_v2")
        layers = tuple(replace(layer, head_dim_k=200) for layer in odd.layers)
        policy = resolved(replace(odd, layers=layers))
        assert policy.layers[0].rotation == "dense for keys, hadamard for values"


@given(letters=st.text(alphabet="fscr", min_size=1, max_size=24), boundary=st.integers(0, 30))
def test_groups_cover_every_layer_once(letters: str, boundary: int) -> None:
    asked = KvRequest(
        policy="balanced", k="int8", v="turbo4", explicit=False, boundary_v=boundary, boundary_mode="int8",
        boundary_k="auto", sink_tokens=4, tail_tokens=32, strict=False,
    )  # fmt: skip
    kinds = {kind.value[0]: kind for kind in LayerKind if kind is not LayerKind.SHARED}
    layers = tuple(Layer(i, kinds[letter], 2, 64, 64) for i, letter in enumerate(letters))
    policy = resolve(asked, Architecture("llama", "llama", layers, 4, 8192, 100), allowed=None)
    covered = [i for group in policy.groups() for i in range(group.first, group.last + 1)]
    assert covered == list(range(len(letters)))
    assert sum(policy.effective_counts.values()) == len(letters)
