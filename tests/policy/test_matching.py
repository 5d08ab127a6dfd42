from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.errors import PolicyError
from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.matching import check_rules, check_tail, matching
from daemon.policy.spec import LayerRule, Match

Plain = Callable[..., Architecture]

letters = st.text(alphabet="fscrl", min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ("all", {0, 1, 2, 3, 4, 5, 6, 7}),
        ("full", {3, 7}),
        ("sliding", {0, 1, 2, 4, 5}),
        ("2-4", {2, 3, 4}),
        ("3-3", {3}),
        ("first:2", {0, 1}),
        ("last:2", {5, 7}),
        ([0, 7], {0, 7}),
    ],
)
def test_match_means_layers(match: Match, expected: set[int], plain: Plain) -> None:
    """`last:2` skips the recurrent layer 6: first and last count layers with a KV cache."""
    assert matching(match, plain("sssfssrf").layers, "layers.0.match") == expected


@pytest.mark.parametrize("match", ["sliding", "4-9", [0, 9], "first:5", "last:5"])
def test_no_such_layer_is_an_error_with_the_valid_range(match: Match, plain: Plain) -> None:
    with pytest.raises(PolicyError) as caught:
        matching(match, plain("ffff").layers, "layers.2.match")
    assert caught.value.path == "layers.2.match"
    assert caught.value.hint == "this model has layers 0-3: 4 full"


@given(letters=letters, first=st.integers(0, 60), last=st.integers(0, 60))
def test_a_range_is_exactly_its_indices_or_an_error(letters: str, first: int, last: int) -> None:
    layers = layers_of(letters)
    valid = first <= last < len(layers)
    try:
        found = matching(f"{first}-{last}", layers, "")
    except PolicyError:
        assert not valid
    else:
        assert valid
        assert found == set(range(first, last + 1))


@given(letters=letters, count=st.integers(1, 40))
def test_first_and_last_mirror_each_other(letters: str, count: int) -> None:
    layers = layers_of(letters)
    cached = sum(letter != "r" for letter in letters)
    if count > cached:
        return
    first = matching(f"first:{count}", layers, "")
    last = matching(f"last:{count}", layers_of(letters[::-1]), "")
    assert len(first) == count
    assert first == {len(layers) - 1 - index for index in last}


def layers_of(letters: str) -> list[Layer]:
    kinds = {kind.value[0]: kind for kind in LayerKind if kind is not LayerKind.SHARED}
    return [Layer(i, kinds[letter]) for i, letter in enumerate(letters)]


@pytest.mark.parametrize("match", ["", "9-3", "every:2", "first:0", [], [-1]])
def test_a_match_of_no_known_form_lists_the_forms(match: Match) -> None:
    with pytest.raises(PolicyError, match="means no layers") as caught:
        check_rules([LayerRule(match=match, mode="fp16")])
    assert '"first:2"' in str(caught.value.hint)


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        (LayerRule(match="all", mode="q8_0"), "layers.1.mode"),
        (LayerRule(match="all", k="turbo9"), "layers.1.k"),
        (LayerRule(match="all", v="turbo9"), "layers.1.v"),
        (LayerRule(match="all", tail_tokens=16), "layers.1.tail_tokens"),
        (LayerRule(match="all"), "layers.1"),
    ],
)
def test_a_wrong_rule_is_named_by_its_path(rule: LayerRule, path: str) -> None:
    with pytest.raises(PolicyError) as caught:
        check_rules([LayerRule(match="all", mode="fp16"), rule])
    assert caught.value.path == path
    assert caught.value.hint


@pytest.mark.parametrize("tail", [None, 0, 32, 64, 4096])
def test_a_tail_of_whole_tiles_is_accepted(tail: int | None) -> None:
    check_tail(tail, "tail_tokens")


def test_a_tail_of_part_of_a_tile_names_both_neighbours() -> None:
    with pytest.raises(PolicyError, match="40 is not a multiple of 32") as caught:
        check_tail(40, "tail_tokens")
    assert caught.value.hint == "write 32 or 64"
