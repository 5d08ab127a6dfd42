"""From nodes to models: types, unknown keys, references, paths, and a problem with a place for each fault.

A scalar gets its type from the key that wants it, so `1:30`, `3_8` and `0123` are never numbers and
`yes` is never true. What the types allow goes to pydantic for ranges and patterns.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from daemon.config.keys import Key, Model, Shape, keys_of
from daemon.config.substitute import BadReferenceError, has_reference, substitute
from daemon.config.yaml_nodes import Block, Items, Node, Place, Scalar
from daemon.errors import Problem
from daemon.policy.spec import FrozenModel

M = TypeVar("M", bound=FrozenModel)
Value = str | int | float | bool | None

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_CONSTANTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
# YAML 1.1 reads these as booleans, YAML 1.2 as text: nobody can tell what the writer meant.
_TRUE_WORDS = frozenset({"yes", "Yes", "YES", "on", "On", "ON"})
_FALSE_WORDS = frozenset({"no", "No", "NO", "off", "Off", "OFF"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Read(Generic[M]):
    """A model and the paths of what was written for it but refused."""

    model: M
    refused: frozenset[str]


class _Refused:
    """Stands for a value that was reported and left out."""


_REFUSED = _Refused()


@dataclass(slots=True)
class Problems:
    """Every problem found in a run, each place and message once.

    Defaults are read once for themselves and again under every server; what is wrong with them is
    reported where they stand, the first time.
    """

    found: list[Problem] = field(default_factory=list)
    _seen: set[tuple[str, int, int, str]] = field(default_factory=set)

    def add(self, place: Place, path: str, message: str, hint: str | None = None) -> None:
        """Record one problem at *place*."""
        self.extend([place.problem(path, message, hint)])

    def extend(self, problems: Iterable[Problem]) -> None:
        """Record *problems*."""
        for problem in problems:
            key = (problem.file, problem.line, problem.col, problem.message)
            if key not in self._seen:
                self._seen.add(key)
                self.found.append(problem)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads blocks with one environment into one list of problems."""

    environ: Mapping[str, str]
    problems: Problems

    def read(
        self,
        node: Node,
        model: type[M],
        path: str,
        *,
        placeholders: Mapping[str, object] | None = None,
        entry: Place | None = None,
    ) -> Read[M] | None:
        """Return *node* as *model*; what was refused has its default there, or its placeholder.

        With *entry*, the place of the key that holds the block, missing keys are reported there. None
        means that *node* is no block at all.
        """
        refused: set[str] = set()
        data = self.value(node, Shape(model=model), path)
        if not isinstance(node, Block) or not isinstance(data, dict):
            return None
        for key in keys_of(model).values():
            if key.required and key.name not in node.entries and entry:
                hint = f"add `{key.name}: ...`"
                self.problems.add(entry, path, f'the key "{key.name}" is missing', hint)
        refused.update(_left_out(node, data, ""))
        while True:
            try:
                return Read(
                    model.model_validate({**(placeholders or {}), **data}), frozenset(refused)
                )
            except ValidationError as error:
                faults = error.errors(include_url=False)
            for fault in faults:
                self._explain(fault, node, path)
            # once more without them, so that the checks that follow can find what else is wrong
            dropped = {_drop(data, fault["loc"]) for fault in faults}
            if None in dropped:
                return None
            refused.update(gone for gone in dropped if gone)

    def value(
        self, node: Node, shape: Shape, path: str, key: Key | None = None, *, later: bool = False
    ) -> Any:
        """Return *node* as plain data of *shape*, `_REFUSED` after a problem."""
        match node:
            case Block() if shape.model is not None:
                return self._block(node, shape.model, path, later=later)
            case Block() if shape.value is not None:
                return self._mapping(node, shape.value, path, key)
            case Items() if shape.item is not None:
                item = shape.item
                read = [self.value(n, item, f"{path}.{i}", key) for i, n in enumerate(node.nodes)]
                return _REFUSED if any(isinstance(r, _Refused) for r in read) else read
            case Scalar():
                return self._scalar(node, shape, path, key)
            case _:
                return self._wrong_type(node, shape, path, key)

    def text(self, node: Node, path: str) -> str | None:
        """Return *node* as text, None after a problem."""
        value = self.value(node, Shape(kinds=frozenset({"text"})), path)
        return value if isinstance(value, str) else None

    def _block(self, node: Block, model: Model, path: str, *, later: bool) -> dict[str, object]:
        keys = keys_of(model)
        data: dict[str, object] = {}
        for name, entry in node.entries.items():
            where = f"{path}.{name}" if path else name
            key = keys.get(name)
            if key is None:
                message, hint = unknown_key(name, tuple(keys))
                self.problems.add(entry.place, where, message, hint)
            elif (later or key.later) and key.shape.model is None:
                if key.at_default(plain(entry.node)):
                    data[name] = plain(entry.node)
                else:
                    self.problems.add(entry.place, where, "not yet available", _later_hint(key))
            else:
                value = self.value(entry.node, key.shape, where, key, later=later or key.later)
                if not isinstance(value, _Refused):
                    data[name] = value
        return data

    def _mapping(self, node: Block, shape: Shape, path: str, key: Key | None) -> dict[str, object]:
        data: dict[str, object] = {}
        for name, entry in node.entries.items():
            if key is not None and key.secret and not _VARIABLE.fullmatch(name):
                hint = "letters, digits and _, not starting with a digit"
                self.problems.add(entry.place, path, "this is no name of a variable", hint)
                continue
            value = self.value(entry.node, shape, f"{path}.{name}", key)
            if not isinstance(value, _Refused):
                data[name] = value
        return data

    def _scalar(self, node: Scalar, shape: Shape, path: str, key: Key | None) -> object:
        try:
            text = substitute(node.text, self.environ)
        except BadReferenceError as error:
            self.problems.add(node.place, path, str(error), error.hint)
            return _REFUSED
        wants_text = "text" in shape.kinds
        written = node.plain and not (wants_text and has_reference(node.text))
        value = resolve(text) if written else text
        if value is None and "null" in shape.kinds:
            return None
        if "duration" in shape.kinds:
            return text  # a bare number is refused with the units, by the validator of durations
        if isinstance(value, str):
            if value in shape.words:
                return value
            if wants_text:
                return self._as_text(node, value, path, key)
        if _has_kind(value, shape):
            return value
        return self._wrong_type(node, shape, path, key)

    def _as_text(self, node: Scalar, value: str, path: str, key: Key | None) -> object:
        if node.plain and value in _TRUE_WORDS | _FALSE_WORDS and not has_reference(node.text):
            hint = f'quote it: "{value}"' if key is None or not key.secret else "quote it"
            self.problems.add(node.place, path, "expected text, found a boolean of YAML 1.1", hint)
            return _REFUSED
        if key is None or not (key.path or key.model_path):
            return value
        try:
            return _absolute(value, Path(node.place.file).parent, hub=key.model_path)
        except ValueError as error:
            self.problems.add(node.place, path, str(error))
            return _REFUSED

    def _wrong_type(self, node: Node, shape: Shape, path: str, key: Key | None) -> _Refused:
        secret = key is not None and key.secret
        message = f"expected {shape.expected}, found {describe(node, secret=secret)}"
        self.problems.add(node.place, path, message, _type_hint(node, shape))
        return _REFUSED

    def _explain(self, fault: ErrorDetails, node: Node, path: str) -> None:
        kind, loc = fault["type"], fault["loc"]
        place: Place = node.place
        for (
            part
        ) in loc:  # a union adds parts of its own to the location: only what is in the file counts
            if isinstance(node, Block) and part in node.entries:
                place, node = node.entries[str(part)].node.place, node.entries[str(part)].node
                path = f"{path}.{part}" if path else str(part)
            elif isinstance(node, Items) and isinstance(part, int) and part < len(node.nodes):
                node = node.nodes[part]
                place, path = node.place, f"{path}.{part}"
        hidden = path.rpartition(".")[2] == "api_key" or (
            isinstance(node, Scalar) and has_reference(node.text)
        )
        limits = fault.get("ctx", {})
        if kind == "value_error":
            message = "this value is refused" if hidden else str(limits["error"])
        elif kind == "missing":
            missing = loc[-1]
            message = (
                f'the key "{missing}" is missing'
                if isinstance(missing, str)
                else "an item is missing"
            )
        else:
            message = (
                f"{_CONSTRAINTS.get(kind, fault['msg']).format(**limits)}, found {describe(node)}"
            )
        self.problems.add(place, path, message)


_CONSTRAINTS = {
    "greater_than_equal": "expected at least {ge:g}",
    "greater_than": "expected more than {gt:g}",
    "less_than_equal": "expected at most {le:g}",
    "less_than": "expected less than {lt:g}",
    "string_too_short": "expected text that is not empty",
    "too_long": "expected at most {max_length} items",
    "too_short": "expected at least {min_length} items",
}


def _left_out(node: Block, data: Mapping[str, object], prefix: str) -> Iterator[str]:
    """Yield the paths of *node* that did not make it into *data*."""
    for name, entry in node.entries.items():
        path = f"{prefix}{name}"
        if name not in data:
            yield path
        elif isinstance(entry.node, Block) and isinstance(inner := data[name], dict):
            yield from _left_out(entry.node, inner, f"{path}.")


def _drop(data: dict[str, object], loc: tuple[int | str, ...]) -> str | None:
    """Take the innermost key on the way along *loc* out of *data*; return its path, None if there is none."""
    block, name, path = data, None, ""
    at: object = data
    for part in loc:
        if isinstance(at, dict) and part in at:
            block, name = at, part
            path = f"{path}.{part}" if path else str(part)
            at = at[part]
        elif isinstance(at, list):
            break
    if name is None:
        return None
    del block[str(name)]
    return path


def resolve(text: str) -> Value:
    """Return what plain *text* means: null, a boolean or a decimal number where it is one beyond doubt."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text


def plain(node: Node) -> object:
    """Return *node* as plain data, without references or paths."""
    match node:
        case Scalar():
            return resolve(node.text) if node.plain else node.text
        case Items():
            return [plain(item) for item in node.nodes]
        case Block():
            return {name: plain(entry.node) for name, entry in node.entries.items()}


def describe(node: Node, *, secret: bool = False) -> str:
    """Return what *node* is in words for a message; a reference stays as it was written."""
    match node:
        case Block():
            return "a mapping"
        case Items():
            return "a list"
        case Scalar(text=text):
            value = resolve(text) if node.plain else text
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            match value:
                case None:
                    return "nothing"
                case bool():
                    return "a boolean" if secret else f"the boolean {shown}"
                case int() | float():
                    return "a number" if secret else f"the number {shown}"
                case _:
                    return "text" if secret else f'"{shown}"'


@functools.lru_cache(maxsize=256)
def unknown_key(name: str, known: tuple[str, ...]) -> tuple[str, str]:
    """Return the message and hint for a key that is not among *known*."""
    close = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"one of {', '.join(known)}"
    return f'unknown key "{name[:64]}"', hint


def _has_kind(value: Value, shape: Shape) -> bool:
    match value:
        case bool():
            return "boolean" in shape.kinds
        case int():
            return bool(shape.kinds & {"integer", "number", "size"})
        case float():
            return "number" in shape.kinds
        case str():
            return "size" in shape.kinds
        case None:
            return False


def _type_hint(node: Node, shape: Shape) -> str | None:
    if not isinstance(node, Scalar):
        return None
    if "boolean" in shape.kinds and node.text in _TRUE_WORDS | _FALSE_WORDS:
        return f"write {'true' if node.text in _TRUE_WORDS else 'false'}"
    if "text" in shape.kinds and node.plain and node.text:
        return "quote it"
    if shape.kinds & {"integer", "number"} and not node.plain and resolve(node.text) != node.text:
        return "remove the quotes"
    if node.plain and not node.text and (shape.model or shape.value):
        return "indent its keys under it, or leave it out"
    return None


def _later_hint(key: Key) -> str:
    default = key.field.default
    written = sorted(key.accepted) or ([str(default)] if isinstance(default, str) else [])
    return f"leave it out, or write {' or '.join(written)}" if written else "leave it out"


def _absolute(text: str, folder: Path, *, hub: bool) -> str:
    """Return the path that *text* means in a file of *folder*; a hub id comes back as it is."""
    if not text:
        raise ValueError("expected a path, found nothing")
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError("the home folder after `~` is not known") from None
    path = Path(os.path.normpath(folder / path))
    if hub and _HUB_ID.fullmatch(text) and not _is_folder(path):
        return text
    return str(path)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
