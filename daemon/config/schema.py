"""The JSON Schema of servers.yaml, for editors: the models, and what the loader accepts on top of them."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from daemon.config.keys import Key, Model, blocks_of, keys_of
from daemon.config.spec import SCHEMA_VERSION, DaemonSpec, ServerSpec
from daemon.policy.schemes import ALIASES, SCHEMES

_REFERENCE = {"type": "string", "pattern": r"\$\{env:[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}"}
_LATER = "Not yet available: only the default is accepted."


def json_schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12; unknown keys are refused as `tqd check` refuses them."""
    models: list[tuple[type[DaemonSpec] | type[ServerSpec], Any]] = [
        (DaemonSpec, "validation"),
        (ServerSpec, "validation"),
    ]
    _, schema = models_json_schema(models, ref_template="#/$defs/{model}")
    blocks = {model.__name__: model for model in (*blocks_of(DaemonSpec), *blocks_of(ServerSpec))}
    definitions = {
        name: _block(schema["$defs"][name], model) for name, model in sorted(blocks.items())
    }
    server = definitions["ServerSpec"]
    server.pop("required")  # a key that is required may stand in the defaults
    _suggest_schemes(definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "servers.yaml of tqd",
        "type": "object",
        "additionalProperties": False,
        "required": ["version"],
        "properties": {
            "version": {"const": SCHEMA_VERSION, "description": "The version of this format."},
            "include": {
                "type": ["array", "null"],
                "items": {"type": "string"},
                "description": "Further files with servers and defaults, relative to this one.",
            },
            "daemon": {
                "anyOf": [{"$ref": "#/$defs/DaemonSpec"}, {"type": "null"}],
                "description": "The daemon itself.",
            },
            "defaults": {
                "anyOf": [{"$ref": "#/$defs/ServerSpec"}, {"type": "null"}],
                "description": "Keys of a server, merged under every server.",
            },
            "servers": {
                "type": "object",
                "propertyNames": {"pattern": "^[a-z0-9][a-z0-9._-]{0,62}$"},
                "additionalProperties": {"$ref": "#/$defs/ServerSpec"},
                "description": "The servers by name.",
            },
        },
        "$defs": definitions,
    }


def _block(schema: dict[str, Any], model: Model) -> dict[str, Any]:
    defaults = model.model_construct().model_dump(mode="json")
    keys = keys_of(model)
    properties = {
        name: _key(key, keys[name], defaults.get(name))
        for name, key in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def _key(schema: dict[str, Any], key: Key, default: object) -> dict[str, Any]:
    """Return the schema of one key, with its default as a file would say it."""
    described: dict[str, Any] = {"description": schema.get("description", "")}
    if key.later:
        described["description"] = f"{_LATER} {described['description']}".strip()
    if "default" in schema and not isinstance(default, dict):
        described["default"] = default
    if key.later and key.shape.model is None:
        return {**described, "enum": [default]}
    dropped = ("not_yet_available", "title", "default", "description")
    narrowed = {name: value for name, value in schema.items() if name not in dropped}
    choices = narrowed.pop("anyOf", None) or [narrowed]
    if any(_is_narrow(choice) for choice in choices):
        choices = [*choices, _REFERENCE]
    return {**described, **(choices[0] if len(choices) == 1 else {"anyOf": choices})}


def _is_narrow(schema: dict[str, Any]) -> bool:
    """Return whether a reference to the environment would not fit *schema* as it stands."""
    narrow = {"enum", "const", "pattern"} & schema.keys()
    return bool(narrow) or schema.get("type") in ("integer", "number", "boolean")


def _suggest_schemes(definitions: dict[str, Any]) -> None:
    names = [*SCHEMES, *ALIASES]
    for block in ("KvSpec", "LayerRule"):
        definitions[block]["properties"]["mode"]["examples"] = names
