"""What a scalar means, and how a message shows it.

`1:30`, `3_8` and `0123` are never numbers, `yes` is never true: only what every reader of YAML agrees on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from daemon.config.yaml_nodes import Block, Items, Node, Scalar

Value = str | int | float | bool | None

# YAML 1.1 reads these as booleans, YAML 1.2 as text: nobody can tell what the writer meant.
TRUE_WORDS = frozenset({"yes", "Yes", "YES", "on", "On", "ON"})
FALSE_WORDS = frozenset({"no", "No", "NO", "off", "Off", "OFF"})

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_CONSTANTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_SHOWN_CHARACTERS = 60


def resolve(text: str) -> Value:
    """Return what *text* without quotes means: null, a boolean, a decimal number, else itself."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text


def plain(node: Node) -> object:
    """Return *node* as plain data; references to the environment stay text."""
    match node:
        case Scalar():
            return resolve(node.text) if node.plain else node.text
        case Items():
            return [plain(item) for item in node.nodes]
        case Block():
            return {name: plain(entry.node) for name, entry in node.entries.items()}


def is_nothing(node: Node) -> bool:
    """Return whether *node* is null: nothing is written, or everything is commented out."""
    return isinstance(node, Scalar) and plain(node) is None


def describe(node: Node, *, secret: bool = False) -> str:
    """Return what *node* is in words for a message; a reference stays as it was written."""
    if isinstance(node, Block):
        return "a mapping"
    if isinstance(node, Items):
        return "a list"
    value = resolve(node.text) if node.plain else node.text
    if value is None:
        return "nothing"
    kind = {bool: "boolean", int: "number", float: "number"}.get(type(value), "")
    if secret:
        return f"a {kind}" if kind else "text"
    text = (
        node.text if len(node.text) <= _SHOWN_CHARACTERS else f"{node.text[:_SHOWN_CHARACTERS]}..."
    )
    return f"the {kind} {text}" if kind else f'"{text}"'
