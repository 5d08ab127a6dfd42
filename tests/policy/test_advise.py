from __future__ import annotations

from collections.abc import Callable

import pytest

from daemon.policy.advise import Attention, Choice, advise, attention_of
from daemon.policy.architecture import Architecture
from daemon.policy.budget import kv_bytes
from daemon.policy.request import request
from daemon.policy.resolve import resolve
from daemon.policy.schemes import parse_scheme
from daemon.policy.spec import KvSpec, NamedPolicy

Arch = Callable[[str], Architecture]
Plain = Callable[..., Architecture]
Policies = dict[str, NamedPolicy]


def suggested(arch: Architecture, policies: Policies, allowed: str | None = None) -> list[str]:
    return [row.suggest.scheme for row in advise(arch, policies, allowed=allowed).rows]


@pytest.mark.parametrize(
    ("letters", "attention"),
    [
        ("fff", Attention.STANDARD),
        ("ssf", Attention.SLIDING),
        ("ccf", Attention.SLIDING),
        ("rrf", Attention.HYBRID),
        ("lll", Attention.LATENT),
        ("rrl", Attention.LATENT),
        ("rrr", Attention.RECURRENT),
        ("sss", Attention.WINDOWED),
    ],
)
def test_the_layers_decide_the_family(letters: str, attention: Attention, plain: Plain) -> None:
    assert attention_of(plain(letters)) is attention


@pytest.mark.parametrize("letters", ["ff", "sf", "rf"])
def test_longer_contexts_get_fewer_bits(letters: str, plain: Plain, policies: Policies) -> None:
    arch = plain(letters, max_context=131072)
    assert suggested(arch, policies) == ["fp16", "int8", "turbo8v4"]
    assert suggested(arch, policies, "measured: KLD .001") == ["fp16", "int8", "turbo4v4"]


def test_the_evidence_for_4_bit_keys_is_the_reason(plain: Plain, policies: Policies) -> None:
    arch = plain("ff", max_context=131072)
    assert (
        "measured: KLD .001" in advise(arch, policies, allowed="measured: KLD .001").rows[-1].reason
    )
    assert "tqd eval" in advise(arch, policies, allowed=None).rows[-1].reason


@pytest.mark.parametrize("letters", ["rr", "ss"])
def test_nothing_is_suggested_where_nothing_grows(
    letters: str, plain: Plain, policies: Policies
) -> None:
    advised = advise(plain(letters, max_context=131072), policies, allowed=None)
    assert {row.suggest.scheme for row in advised.rows} == {"fp16"}
    assert "nothing to save" in advised.rows[-1].reason


def test_a_model_gets_no_advice_for_contexts_that_it_cannot_have(
    plain: Plain, policies: Policies
) -> None:
    assert suggested(plain("ff", max_context=4096), policies) == ["fp16"]
    advised = advise(plain("ff", max_context=8192), policies, allowed=None)
    assert [row.context_tokens for row in advised.rows] == [4096, 8192]


def test_a_scheme_that_would_fall_back_is_never_suggested(plain: Plain, policies: Policies) -> None:
    arch = plain("ff", max_context=8192, stock_cache="its attention computes on keys")
    *_, medium = advise(arch, policies, allowed=None).rows
    assert medium.suggest.scheme == "fp16"
    assert medium.also == ()
    assert "its attention computes on keys" in medium.reason


def test_bytes_are_those_of_the_longest_context_of_a_row(plain: Plain, policies: Policies) -> None:
    *_, medium = advise(plain("ff", max_context=8192), policies, allowed=None).rows
    # 2 layers, 2 heads, a key and a value of 64: 2 bytes each at 16 bits
    assert medium.exact == Choice("fp16", "policy: exact", 8192 * 2 * 2 * 128 * 2)
    assert medium.suggest.write == "policy: quality"
    assert 1.8 < medium.exact.kv_bytes / medium.suggest.kv_bytes < 2


@pytest.mark.parametrize("letters", ["ff", "sf", "rf", "ll", "rl"])
@pytest.mark.parametrize("allowed", [None, "evidence"])
def test_what_is_written_stores_what_is_suggested(
    letters: str, allowed: str | None, plain: Plain, policies: Policies
) -> None:
    """A named policy leaves latents alone, so `policy: quality` would be bad advice for them."""
    arch = plain(letters, max_context=131072)
    for row in advise(arch, policies, allowed=allowed).rows:
        for choice in (row.suggest, *row.also):
            key, value = choice.write.split(": ")
            resolved = resolve(
                request(KvSpec.model_validate({key: value}), policies), arch, allowed=allowed
            )
            assert kv_bytes(resolved, arch, context_tokens=row.context_tokens) == choice.kv_bytes


def test_3_bit_values_beside_16_bit_keys_are_never_suggested(
    arch: Arch, policies: Policies
) -> None:
    for name in ("llama", "gemma3", "qwen3_next", "deepseek_v3", "mamba2", "gpt_oss", "qwen2"):
        for allowed in (None, "evidence"):
            for row in advise(arch(name), policies, allowed=allowed).rows:
                names = {row.suggest.scheme, *(choice.scheme for choice in row.also)}
                assert parse_scheme("turbo0v3").name not in names


def test_a_key_bias_and_few_growing_layers_are_told(
    arch: Arch, plain: Plain, policies: Policies
) -> None:
    assert any(
        "measure first" in note for note in advise(arch("qwen2"), policies, allowed=None).notes
    )
    few = advise(plain("rrrrf"), policies, allowed=None)
    assert any("only 1 of 5 layers" in note for note in few.notes)
