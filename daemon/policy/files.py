"""Read a YAML file of policies/ into a frozen model; every refusal names the file and the line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from daemon.errors import ConfigError, Problem

Model = TypeVar("Model", bound=BaseModel)


def load(path: Path, model: type[Model]) -> Model:
    """Return the YAML file *path* as *model*.

    Raises:
        ConfigError: with every problem in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_keys(node)
        data = None if node is None else loader.construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        raise refused(path, f"cannot be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, col = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise ConfigError([Problem(str(path), line, col, "", f"{error.problem}")]) from error
    except yaml.YAMLError as error:
        raise refused(path, f"not YAML: {error}") from error
    except (RecursionError, TypeError, ValueError) as error:
        # nested too deep, a key that is no scalar, a date that is none
        raise refused(path, "not YAML of the kind a policy is made of") from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        problems = [_problem(path, text, fault["loc"], *_said(fault, model)) for fault in faults]
        raise ConfigError(problems) from error


def _check_keys(node: yaml.Node | None) -> None:
    """Refuse a key that stands twice, which YAML would let the later one win."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f'the key "{key.value}" stands twice', problem_mark=key.start_mark
                )
            seen.add(key.value)
            _check_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item)


def _said(fault: ErrorDetails, model: type[BaseModel]) -> tuple[str, str | None]:
    """Return pydantic's *fault* in our words, with a hint for an unknown key."""
    if fault["type"] != "extra_forbidden":
        return fault["msg"].removeprefix("Value error, "), None
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    known = sorted({name for part in parts for name in part.get("properties", {})})
    close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
    return "unknown key", f'did you mean "{close[0]}"?' if close else f"one of {', '.join(known)}"


def refused(path: Path, message: str, hint: str | None = None) -> ConfigError:
    """Return the refusal of a whole file."""
    return ConfigError([Problem(str(path), 0, 0, "", message, hint)])


def located(path: Path, key: str, message: str, hint: str | None) -> ConfigError:
    """Return the refusal of the dotted *key* of a file that was read before."""
    loc = [int(part) if part.isdigit() else part for part in key.split(".")]
    return ConfigError([_problem(path, path.read_text(encoding="utf-8"), loc, message, hint)])


def _problem(
    path: Path, text: str, loc: Sequence[str | int], message: str, hint: str | None = None
) -> Problem:
    """Return a problem at the deepest node of *text* that *loc* leads to."""
    node: yaml.Node | None = yaml.compose(text, yaml.SafeLoader)
    mark = node.start_mark if node else None
    for part in loc:
        node, mark = _step(node, part, mark)
    line, col = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    return Problem(str(path), line, col, ".".join(map(str, loc)), message, hint)


def _step(
    node: yaml.Node | None, part: str | int, mark: yaml.Mark | None
) -> tuple[yaml.Node | None, yaml.Mark | None]:
    """Return the child of *node* at *part* and where it starts; *mark* when there is none."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value, key.start_mark
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark
    return None, mark
