"""Inline PTX as C++: each statement of an `asm` becomes a call of the function of that name in cpp/include/ptx.h.

The text of the instruction is what counts: operands come in the order in which it names them, so a wrong `%2`
is wrong here too. An instruction that the header does not have does not compile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_ASM = re.compile(r"\basm\b(?:\s+volatile\b)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r'\s*"[^"]*"\s*\((.*)\)\s*', re.DOTALL)
_NAME = re.compile(r"[\w.]+(?:::[\w.]+)*")


class PtxError(ValueError):
    """An `asm` that this cannot read."""


class _Asm(NamedTuple):
    start: int
    end: int
    sections: list[str]  # text, outputs, inputs, clobbers


def translated(source: str) -> str:
    """Return *source* with every `asm` as C++; no line moves."""
    parts, at = [], 0
    for start, end, sections in _statements(source):
        parts += [source[at:start], _block(sections), "\n" * source.count("\n", start, end)]
        at = end
    return "".join([*parts, source[at:]])


def _statements(source: str) -> Iterator[_Asm]:
    for match in _ASM.finditer(source):
        sections, end = _sections(source, match.end())
        yield _Asm(match.start(), end, sections)


def _sections(source: str, at: int) -> tuple[list[str], int]:
    """Return the parts of an `asm` between its colons, and where it ends; *at* is behind its parenthesis."""
    sections, depth, begin = [], 1, at
    while at < len(source):
        string = _STRING.match(source, at)
        if string:
            at = string.end()
            continue
        character = source[at]
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 or (depth == 1 and character == ":"):
            sections.append(source[begin:at])
            begin = at + 1
        if depth == 0:
            return sections, at + 1
        at += 1
    raise PtxError(f"an asm without an end: {source[begin : begin + 80]!r}")


def _block(sections: list[str]) -> str:
    text = "".join(_STRING.findall(sections[0])).replace("\\n", " ")
    operands = [
        operand
        for section in sections[1:3]
        for part in _split(section)
        for operand in [_named(part)]
    ]
    statements = [_statement(part.strip(), operands) for part in _body(text).split(";")]
    return "{ " + "".join(statements) + "}"


def _split(section: str) -> list[str]:
    """Return the operands of a section, which commas divide, but not those within their parentheses."""
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(section):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and character == ",":
            parts.append(section[begin:at])
            begin = at + 1
    return [part for part in [*parts, section[begin:]] if part.strip()]


def _named(operand: str) -> str:
    match = _OPERAND.fullmatch(operand)
    if match is None:
        raise PtxError(f"an operand of an asm: {operand!r}")
    return match[1]


def _body(text: str) -> str:
    """Return the statements of *text* without the braces of their own scope."""
    text = text.strip()
    return text[1:-1] if text.startswith("{") and text.endswith("}") else text


def _statement(text: str, operands: list[str]) -> str:
    if not text:
        return ""
    if text.startswith(".reg .pred "):
        return f"bool {text.removeprefix('.reg .pred ')} = false; "
    name = _NAME.match(text)
    if name is None:
        raise PtxError(f"a statement of an asm: {text!r}")
    given = re.sub(r"[\[\]{}]", "", text[name.end() :]).replace("|", ",").split(",")
    arguments = [_argument(each.strip(), operands) for each in given if each.strip()]
    return f"ptx::{re.sub(r'[.:]+', '_', name[0])}({', '.join(arguments)}); "


def _argument(text: str, operands: list[str]) -> str:
    if text == "_":
        return "ptx::nowhere"
    return f"({operands[int(text[1:])]})" if text.startswith("%") else text
