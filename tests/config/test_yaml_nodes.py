from __future__ import annotations

import pytest

from daemon.config.yaml_nodes import Block, Items, Place, Scalar, compose
from daemon.errors import ConfigError, Problem


def composed(text: str) -> Block:
    problems: list[Problem] = []
    node = compose(text, "f.yaml", problems)
    assert isinstance(node, Block)
    assert problems == []
    return node


def test_nodes_know_where_they_stand() -> None:
    root = composed("a: 1\nb:\n  - é: [x, 'y']\n")
    assert root.entries["b"].place == Place("f.yaml", 2, 1)
    items = root.entries["b"].node
    assert isinstance(items, Items)
    inner = items.nodes[0]
    assert isinstance(inner, Block)
    assert inner.entries["é"].place == Place("f.yaml", 3, 5)
    values = inner.entries["é"].node
    assert isinstance(values, Items)
    assert [(node.place.col, node.plain) for node in values.nodes if isinstance(node, Scalar)] == [
        (9, True),
        (12, False),
    ]


def test_a_value_behind_an_alias_stands_where_it_was_written() -> None:
    root = composed("a: &x 1\nb: *x\n")
    assert root.entries["b"].place.line == 2
    assert root.entries["b"].node.place.line == 1


def test_an_anchor_may_be_set_again() -> None:
    root = composed("a: &x 1\nb: &x 2\nc: *x\n")
    node = root.entries["c"].node
    assert isinstance(node, Scalar)
    assert node.text == "2"


def test_merge_keys_never_win_over_a_key_that_is_written() -> None:
    root = composed("a: &a {x: 1, y: 1}\nb: {y: 2, <<: *a}\n")
    node = root.entries["b"].node
    assert isinstance(node, Block)
    assert {name: getattr(entry.node, "text", None) for name, entry in node.entries.items()} == {
        "y": "2",
        "x": "1",
    }


def test_a_quoted_merge_key_is_a_key() -> None:
    node = composed('a: {"<<": 1}').entries["a"].node
    assert isinstance(node, Block)
    assert list(node.entries) == ["<<"]


def test_many_aliases_that_stay_small_are_no_bomb() -> None:
    root = composed("a: &a {x: 1}\nb: [" + ", ".join(["*a"] * 1000) + "]\n")
    assert root.size > 2000


def test_depth_counts_what_aliases_bring() -> None:
    rows = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [[[*a{i - 1}]]]" for i in range(1, 20)]
    with pytest.raises(ConfigError, match="levels deep"):
        compose("\n".join(rows), "f.yaml", [])


def test_control_characters_are_escaped_in_messages() -> None:
    """A file must not be able to drive the terminal of whoever reads its errors."""
    problems: list[Problem] = []
    compose('"\\x1b[2J": 1\n"\\x1b[2J": 2\n', "f.yaml", problems)
    assert "\x1b" not in str(problems[0])
    assert "\\x1b[2J" in str(problems[0])
