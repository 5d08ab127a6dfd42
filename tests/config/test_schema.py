from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.config.keys import blocks_of
from daemon.config.scalars import plain
from daemon.config.schema import json_schema
from daemon.config.spec import DaemonSpec, ServerSpec
from daemon.config.yaml_nodes import compose
from daemon.errors import ConfigError

jsonschema = pytest.importorskip("jsonschema", reason="validates the schema itself")

DATA = Path(__file__).parents[1] / "data"
# Refused by `tqd check` for what a schema cannot say: YAML itself, names taken twice, files, references, meaning.
BEYOND_A_SCHEMA = frozenset({
    "aliases", "alias_of_itself", "backoff", "complex_key", "merge_of_text", "tags", "defaults_once", "duplicate_keys", "hosts", "include_cycle",
    "include_missing", "include_same_server", "key_file_missing", "layer_rules", "model_empty", "policy_unknown",
    "port_of_the_status_endpoint", "references", "required_missing", "schemes", "servers_missing", "status_no_endpoint",
    "status_open_to_the_network", "two_servers_one_port",
})  # fmt: skip


def objects(schema: object) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for value in schema.values():
            yield from objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def written(path: Path) -> object:
    """Return a file as an editor reads it: references stay text."""
    node = compose(path.read_text(encoding="utf-8"), path.name, [])
    return None if node is None else plain(node)


@pytest.fixture(scope="module")
def validator() -> Any:
    return jsonschema.Draft202012Validator(json_schema())


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_every_block_is_closed() -> None:
    assert all(block["additionalProperties"] is False for block in objects(json_schema()))


def test_every_block_and_key_of_the_models_is_in_it_with_a_description() -> None:
    definitions = json_schema()["$defs"]
    for model in {*blocks_of(ServerSpec), *blocks_of(DaemonSpec)}:
        properties = definitions[model.__name__]["properties"]
        assert properties.keys() == model.model_fields.keys()
        assert all(key["description"] for key in properties.values())


def test_defaults_are_written_as_a_file_would_write_them() -> None:
    definitions = json_schema()["$defs"]
    assert definitions["RestartSpec"]["properties"]["window"]["default"] == "10m"
    assert definitions["RestartSpec"]["properties"]["backoff"]["default"] == ["1s", "1m"]


def test_the_schema_is_plain_json() -> None:
    assert json.loads(json.dumps(json_schema())) == json_schema()


@pytest.mark.parametrize("path", sorted((DATA / "good").glob("*.yaml")), ids=lambda path: path.stem)
def test_good_files_satisfy_it(validator: Any, path: Path) -> None:
    assert [error.message for error in validator.iter_errors(written(path))] == []


def test_files_that_are_wrong_in_shape_do_not_satisfy_it(validator: Any) -> None:
    """An editor underlines what `tqd check` would refuse, as far as a schema can know."""
    accepted = set()
    for path in (DATA / "bad").glob("*.yaml"):
        with contextlib.suppress(ConfigError, UnicodeDecodeError):
            if validator.is_valid(written(path)):
                accepted.add(path.stem)
    assert accepted <= BEYOND_A_SCHEMA
