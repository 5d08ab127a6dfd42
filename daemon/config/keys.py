"""What servers.yaml may say at each key, read from the models once: shapes, paths, secrets, not-yets.

The models stay the only list of keys; this module adds what pydantic cannot know about a text file:
which keys hold paths, which are secret, and how to name what was expected.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from daemon.config.spec import ApiKeyFile, DaemonSpec, LogSpec, PromptCacheSpec, ServerSpec
from daemon.policy.spec import CalibrationSource, FrozenModel, KvSpec, LayerRule
from daemon.units import Budget, Duration, Size

Model = type[FrozenModel]
Kind = Literal["text", "integer", "number", "boolean", "null", "size", "duration", "budget"]

# Keys whose relative value is meant relative to the file that holds it.
PATHS: frozenset[tuple[Model, str]] = frozenset({
    (ServerSpec, "adapter"), (ServerSpec, "chat_template"), (ServerSpec, "python"), (ApiKeyFile, "file"),
    (PromptCacheSpec, "disk"), (LogSpec, "dir"), (DaemonSpec, "control"),
    (CalibrationSource, "text"), (CalibrationSource, "profile"),
})  # fmt: skip
# Keys that hold a path or a hub id.
MODELS: frozenset[tuple[Model, str]] = frozenset(
    {(ServerSpec, "model"), (ServerSpec, "draft_model")}
)
# Keys whose values no message, table or log may show.
SECRETS: frozenset[tuple[Model, str]] = frozenset({(ServerSpec, "api_key"), (ServerSpec, "env")})

# What to write, where the type alone does not say it.
HINTS: Mapping[tuple[Model, str], str] = {
    (DaemonSpec, "status"): "host:port, such as 127.0.0.1:8700",
    (ServerSpec, "cors_origins"): "[localhost]",
    (ServerSpec, "aliases"): "[qwen]",
    (ServerSpec, "kv"): "kv: {policy: balanced}",
    (KvSpec, "budget"): "auto, none or a size such as 4GiB",
    (KvSpec, "calibration"): "auto, none, {text: path} or {profile: path}",
}
# What stands for a required key that is missing or wrong while the rest is checked.
STAND_INS: Mapping[tuple[Model, str], str | int] = {
    (ServerSpec, "model"): "-",
    (ServerSpec, "port"): 1,
    (LayerRule, "match"): "all",
    (ApiKeyFile, "file"): "-",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What one value may be; several members are a union."""

    kinds: frozenset[Kind] = frozenset()
    words: tuple[str, ...] = ()
    item: Shape | None = None
    value: Shape | None = None
    model: Model | None = None

    @property
    def expected(self) -> str:
        """The shape in words for a message: ``an integer or auto``."""
        names = [*self.words, *(_KIND_NAMES[kind] for kind in _KIND_NAMES if kind in self.kinds)]
        if self.item:
            names.append(f"a list ({self.item.expected} each)")
        if self.value or self.model:
            names.append("a mapping")
        *others, last = names or ["null"]
        return f"{', '.join(others)} or {last}" if others else last


_KIND_NAMES: dict[Kind, str] = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "size": "a size such as 4GiB",
    "duration": "a duration such as 30s",
    "budget": "auto, a share such as 75% or a size such as 48GiB",
    "text": "text",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a block."""

    name: str
    shape: Shape
    field: FieldInfo
    stand_in: str | int | None
    hint: str | None
    path: bool
    model_path: bool
    secret: bool

    @property
    def required(self) -> bool:
        """Whether the block is nothing without it."""
        return self.field.is_required()

    @property
    def later(self) -> bool:
        """Whether its feature is not built yet: its default is accepted, anything else is refused."""
        extra = self.field.json_schema_extra
        return isinstance(extra, dict) and bool(extra.get("not_yet_available"))

    def at_default(self, value: object) -> bool:
        """Return whether *value* (as YAML gives it) says what the key means when it is left out."""
        annotation: Any = Annotated[(self.field.annotation, *(self.field.metadata or (None,)))]
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(strict=True))
        try:
            return bool(adapter.validate_python(value) == self.field.default)
        except ValidationError:
            return False


@functools.cache
def keys_of(model: Model) -> Mapping[str, Key]:
    """Return the keys of a block of *model*, in the order of its fields."""
    return {
        name: Key(
            name=name,
            shape=_shape(field.annotation, tuple(field.metadata)),
            field=field,
            stand_in=STAND_INS.get((model, name)),
            hint=HINTS.get((model, name)),
            path=(model, name) in PATHS,
            model_path=(model, name) in MODELS,
            secret=(model, name) in SECRETS,
        )
        for name, field in model.model_fields.items()
    }


def walk(model: Model, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield every leaf key under *model* with its dotted path; blocks are entered, not yielded."""
    for name, key in keys_of(model).items():
        path = f"{prefix}{name}"
        inner = key.shape.model or (key.shape.item.model if key.shape.item else None)
        if inner is None or inner in (ApiKeyFile, LayerRule):
            yield path, key
        else:
            yield from walk(inner, f"{path}.")


def blocks_of(model: Model) -> Iterator[Model]:
    """Yield *model* and the model of every block inside it."""
    yield model
    for key in keys_of(model).values():
        inner = key.shape.model or (key.shape.item.model if key.shape.item else None)
        if inner is not None:
            yield from blocks_of(inner)


def _shape(annotation: object, metadata: tuple[object, ...] = ()) -> Shape:
    for note in metadata:
        if isinstance(note, BeforeValidator) and note in _UNITS:
            return Shape(kinds=frozenset({_UNITS[note]}))
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return functools.reduce(_either, (_shape(arg) for arg in args))
    if origin is Literal:
        return Shape(words=tuple(args))
    if origin in (tuple, list):
        return Shape(item=_shape(args[0]))
    if origin is dict:
        return Shape(value=_shape(args[1]))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape(model=annotation)  # type: ignore[arg-type]  # every block is a FrozenModel
    return Shape(kinds=_LEAVES.get(annotation, frozenset()))


def _either(one: Shape, other: Shape) -> Shape:
    return replace(
        one,
        kinds=one.kinds | other.kinds,
        words=one.words + other.words,
        item=one.item or other.item,
        value=one.value or other.value,
        model=one.model or other.model,
    )


_LEAVES: dict[object, frozenset[Kind]] = {
    str: frozenset({"text"}),
    int: frozenset({"integer"}),
    float: frozenset({"number"}),
    bool: frozenset({"boolean"}),
    type(None): frozenset({"null"}),
}
# the validators that tell values with units from bare numbers
_UNITS: dict[object, Kind] = {
    get_args(Size)[1]: "size",
    get_args(Duration)[1]: "duration",
    get_args(Budget)[1]: "budget",
}
