"""From nodes to models: types, unknown keys, references, paths, and a problem with a place for each fault.

A scalar gets its type from the key that wants it. What the types allow goes to pydantic for ranges and
patterns. What was refused is left out, so that the checks that follow can find what else is wrong.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from daemon.config.keys import Key, Model, Shape, keys_of
from daemon.config.scalars import FALSE_WORDS, TRUE_WORDS, Value, describe, plain, resolve
from daemon.config.substitute import BadReferenceError, has_reference, substitute
from daemon.config.yaml_nodes import Block, Items, Node, Place, Scalar
from daemon.errors import Problem
from daemon.policy.spec import FrozenModel

M = TypeVar("M", bound=FrozenModel)

ENVIRONMENT_MISFIT = "the environment's value does not fit"  # which value is nobody's business

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXT = Shape(kinds=frozenset({"text"}))


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
class Read(Generic[M]):
    """A model, and the dotted keys of it that are missing or were refused: they hold stand-ins."""

    model: M
    refused: frozenset[str]


class _Refused:
    """Stands for a value that was reported and is left out."""


_REFUSED = _Refused()


def read(
    node: Block,
    model: type[M],
    path: str,
    environ: Mapping[str, str],
    problems: Problems,
    *,
    entry: Place | None = None,
) -> Read[M] | None:
    """Return *node*, which stands at *path*, as *model*; what is wrong goes into *problems*.

    With *entry*, the place of the key that holds the block, required keys that are missing are
    reported there. None: nothing could be made of it.
    """
    reading = _Reading(environ, problems)
    data = reading.block(node, model, path, entry)
    refused = reading.refused
    while True:
        try:
            made = model.model_validate(data)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        else:
            return Read(made, frozenset(where[len(path) + 1 :] for where in refused))
        for fault in _informative(faults):
            _explain(fault, node, path, problems)
        dropped = {_innermost(data, fault["loc"]) for fault in faults}
        if not _drop(data, dropped, keys_of(model)):
            return None
        refused |= {".".join((path, *map(str, where))) for where in dropped}


def read_text(node: Node, path: str, environ: Mapping[str, str], problems: Problems) -> str | None:
    """Return *node* as text, None after a problem."""
    value = _Reading(environ, problems).value(node, _TEXT, path)
    return value if isinstance(value, str) else None


class _Reading:
    """One walk over a block along its model."""

    def __init__(self, environ: Mapping[str, str], problems: Problems) -> None:
        self._environ = environ
        self._problems = problems
        self.refused: set[str] = set()

    def block(
        self, node: Block, model: Model, path: str, entry: Place | None, *, later: bool = False
    ) -> dict[str, object]:
        """Return the keys of *node* as plain data, with stand-ins for required ones that are not right."""
        keys = keys_of(model)
        data: dict[str, object] = {}
        for name, written in node.entries.items():
            where = f"{path}.{name}"
            key = keys.get(name)
            if key is None:
                self._refuse(written.place, where, *unknown_key(name, tuple(keys), _nested(keys)))
                continue
            if (later or key.later) and key.shape.model is None:
                value: object = plain(written.node)
                if not key.at_default(value):
                    value = self._refuse(
                        written.place, where, "not yet available", _later_hint(key)
                    )
            else:
                value = self.value(written.node, key.shape, where, key, later=later or key.later)
            if not isinstance(value, _Refused):
                data[name] = value
        for key in keys.values():
            if key.required and key.name not in data:
                data[key.name] = key.stand_in
                self.refused.add(f"{path}.{key.name}")
                if key.name not in node.entries and entry is not None:
                    message = f'the key "{key.name}" is missing'
                    self._problems.add(entry, path, message, f"add `{key.name}: ...`")
        return data

    def value(
        self, node: Node, shape: Shape, path: str, key: Key | None = None, *, later: bool = False
    ) -> Any:
        """Return *node* as plain data of *shape*, `_REFUSED` after a problem."""
        match node:
            case Block() if shape.model is not None:
                return self.block(node, shape.model, path, node.place, later=later)
            case Block() if shape.value is not None:
                return self._mapping(node, shape.value, path, key)
            case Items() if shape.item is not None:
                item = shape.item
                read = [self.value(n, item, f"{path}.{i}", key) for i, n in enumerate(node.nodes)]
                return _REFUSED if any(isinstance(one, _Refused) for one in read) else read
            case Scalar():
                return self._scalar(node, shape, path, key)
            case _:
                return self._wrong_type(node, shape, path, key)

    def _mapping(self, node: Block, shape: Shape, path: str, key: Key | None) -> dict[str, object]:
        data: dict[str, object] = {}
        for name, entry in node.entries.items():
            if key is not None and key.secret and not _VARIABLE.fullmatch(name):
                hint = "letters, digits and _, not starting with a digit"
                self._refuse(entry.place, path, "this is no name of a variable", hint)
                continue
            value = self.value(entry.node, shape, f"{path}.{name}", key)
            if not isinstance(value, _Refused):
                data[name] = value
        return data

    def _scalar(self, node: Scalar, shape: Shape, path: str, key: Key | None) -> object:
        try:
            text = substitute(node.text, self._environ)
        except BadReferenceError as error:
            return self._refuse(node.place, path, str(error), error.hint)
        wants_text = "text" in shape.kinds
        # text from the environment is text where text is wanted, whatever it looks like
        as_written = node.plain and not (wants_text and has_reference(node.text))
        value = resolve(text) if as_written else text
        if value is None and "null" in shape.kinds:
            return None
        if "duration" in shape.kinds:
            return text  # a bare number is refused by the validator of durations, which lists the units
        if isinstance(value, str):
            if value in shape.words:
                return value
            if wants_text:
                return self._text(node, value, path, key)
        return value if _fits(value, shape) else self._wrong_type(node, shape, path, key)

    def _text(self, node: Scalar, value: str, path: str, key: Key | None) -> object:
        if node.plain and value in TRUE_WORDS | FALSE_WORDS and not has_reference(node.text):
            hint = f'quote it: "{value}"' if key is None or not key.secret else "quote it"
            message = "expected text, found a boolean of YAML 1.1"
            return self._refuse(node.place, path, message, hint)
        if key is None or not (key.path or key.model_path):
            return value
        try:
            return absolute_path(value, Path(node.place.file).parent, hub=key.model_path)
        except ValueError as error:
            return self._refuse(node.place, path, str(error))

    def _wrong_type(self, node: Node, shape: Shape, path: str, key: Key | None) -> _Refused:
        secret = key is not None and key.secret
        message = f"expected {shape.expected}, found {describe(node, secret=secret)}"
        hint = (key.hint if key else None) or _type_hint(node, shape)
        return self._refuse(node.place, path, message, hint)

    def _refuse(self, place: Place, path: str, message: str, hint: str | None = None) -> _Refused:
        self._problems.add(place, path, message, hint)
        self.refused.add(path)
        return _REFUSED


def _informative(faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return *faults* without those that only say which member of a union a value is not."""
    said = [f for f in faults if not f["type"].endswith("_type") and f["type"] != "literal_error"]
    return said or faults


def _explain(fault: ErrorDetails, node: Node, path: str, problems: Problems) -> None:
    """Add what pydantic refused, at the node that *fault* leads to."""
    for part in fault["loc"]:  # unions add parts of their own: only what the file has counts
        if isinstance(node, Block) and part in node.entries:
            node, path = node.entries[str(part)].node, f"{path}.{part}"
        elif isinstance(node, Items) and isinstance(part, int) and part < len(node.nodes):
            node, path = node.nodes[part], f"{path}.{part}"
    limits = fault.get("ctx", {})
    if isinstance(node, Scalar) and has_reference(node.text):
        message = ENVIRONMENT_MISFIT
    elif fault["type"] == "value_error":
        message = str(limits["error"])
    elif fault["type"] == "missing":
        message = "the list is too short"
    else:
        message = _CONSTRAINTS.get(fault["type"], fault["msg"]).format(**limits)
        message = f"{message}, found {describe(node)}"
    problems.add(node.place, path, message)


_CONSTRAINTS = {
    "greater_than_equal": "expected at least {ge:g}",
    "greater_than": "expected more than {gt:g}",
    "less_than_equal": "expected at most {le:g}",
    "less_than": "expected less than {lt:g}",
    "string_too_short": "expected text that is not empty",
    "too_long": "expected at most {max_length} items",
    "too_short": "expected at least {min_length} items",
}


def _innermost(data: object, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the way along *loc* to the innermost key of a block in *data*."""
    way: list[int | str] = []
    deepest = 0
    for part in loc:
        if isinstance(data, dict) and part in data:
            data = data[part]
            way.append(part)
            deepest = len(way)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
            way.append(part)
    return tuple(way[:deepest])


def _drop(
    data: dict[str, Any], ways: Iterable[tuple[int | str, ...]], keys: Mapping[str, Key]
) -> bool:
    """Take the values at *ways* out of *data*, with stand-ins for required keys; False: one leads nowhere."""
    for way in sorted(ways, key=len, reverse=True):
        if not way:
            return False
        block: Any = data
        for part in way[:-1]:
            block = block[part]
        del block[way[-1]]
        if len(way) == 1 and (key := keys[str(way[0])]).required:
            data[key.name] = key.stand_in
    return True


@functools.lru_cache(maxsize=256)
def unknown_key(name: str, known: tuple[str, ...], nested: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the message and hint for a key that is not among *known*.

    *nested* holds the dotted keys of blocks one level down: a key written a level too high is found there.
    """
    shown = name[:64]
    close = difflib.get_close_matches(shown, known, n=1)
    if not close:
        below = {path.rpartition(".")[2]: path for path in reversed(nested)}
        close = [below[key] for key in difflib.get_close_matches(shown, below, n=1)]
    hint = f"did you mean `{close[0]}`?" if close else f"one of {', '.join(known)}"
    return f'unknown key "{shown}"', hint


def _nested(keys: Mapping[str, Key]) -> tuple[str, ...]:
    return tuple(
        f"{key.name}.{name}"
        for key in keys.values()
        if key.shape.model is not None
        for name in key.shape.model.model_fields
    )


def _fits(value: Value, shape: Shape) -> bool:
    match value:
        case bool():
            return "boolean" in shape.kinds
        case int():
            return bool(shape.kinds & {"integer", "number", "size", "budget"})
        case float():
            return "number" in shape.kinds
        case str():
            return bool(shape.kinds & {"size", "budget"})
        case None:
            return False


def _type_hint(node: Node, shape: Shape) -> str | None:
    if not isinstance(node, Scalar):
        return None
    if "boolean" in shape.kinds and node.text in TRUE_WORDS | FALSE_WORDS:
        return f"write {'true' if node.text in TRUE_WORDS else 'false'}"
    if "text" in shape.kinds and node.plain and node.text:
        return "quote it"
    if shape.kinds & {"integer", "number"} and not node.plain and resolve(node.text) != node.text:
        return "remove the quotes"
    if node.plain and not node.text and (shape.model or shape.value):
        return "indent its keys under it, or leave it out"
    return None


def _later_hint(key: Key) -> str:
    default = key.field.default
    written = [str(default)] if isinstance(default, str) else []
    return f"leave it out, or write {' or '.join(written)}" if written else "leave it out"


def absolute_path(text: str, folder: Path, *, hub: bool = False) -> str:
    """Return the path that *text* means in a file of *folder*; with *hub*, a hub id comes back as it is.

    Raises:
        ValueError: it means none.
    """
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
