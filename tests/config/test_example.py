from __future__ import annotations

import re
from pathlib import Path

import pytest

from daemon.config.keys import blocks_of, walk
from daemon.config.load import Loaded, load
from daemon.config.spec import DaemonSpec, ServerSpec
from daemon.policy.schemes import ALIASES, CACHE_TYPES, KEY_CODEC_NAMES
from daemon.policy.spec import LayerRule
from daemon.resources import shipped

EXAMPLE = shipped("servers.yaml.example")
TEXT = EXAMPLE.read_text(encoding="utf-8")
# a key that is commented out: `# name: value`, where prose has no colon after its first word
COMMENTED = re.compile(r"^(\s*)# (\w+:(?: .*)?)$", re.MULTILINE)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(EXAMPLE, environ={})


def test_it_loads_without_a_warning(loaded: Loaded) -> None:
    assert list(loaded.servers.servers) == ["chat", "small"]
    assert loaded.warnings == ()


def test_every_value_in_it_is_the_default(loaded: Loaded) -> None:
    chat = loaded.servers.servers["chat"]
    assert chat == ServerSpec(model=chat.model, port=chat.port)
    assert loaded.servers.daemon == DaemonSpec()


def test_it_mentions_every_key() -> None:
    paths = {path for model in (ServerSpec, DaemonSpec) for path, _ in walk(model)}
    paths |= set(LayerRule.model_fields)
    mentioned = set(re.findall(r"^\s*(?:#\s+)?(?:- )?(\w+):", TEXT, re.MULTILINE)) | {
        "file",
        "text",
        "profile",
    }
    assert {path.rpartition(".")[2] for path in paths} <= mentioned
    blocks = {model for root in (ServerSpec, DaemonSpec) for model in blocks_of(root)}
    assert {name for model in blocks for name in model.model_fields} <= mentioned


def test_exactly_the_keys_that_are_not_yet_available_are_commented_out() -> None:
    commented = {match[2].partition(":")[0] for match in COMMENTED.finditer(TEXT)}
    later = {path.partition(".")[0] if path.startswith("prompt_cache") else path.rpartition(".")[2]
             for model in (ServerSpec, DaemonSpec) for path, key in walk(model)
             if key.later or path.startswith("prompt_cache")}  # fmt: skip
    inside_blocks = {"capacity", "max_entries", "ttl", "disk", "snapshots"}
    assert commented == later | inside_blocks


def test_what_is_commented_out_loads_at_its_default_too(tmp_path: Path, loaded: Loaded) -> None:
    """A key whose feature is not built yet accepts its default, so that files survive an upgrade."""
    path = tmp_path / "servers.yaml"
    path.write_text(COMMENTED.sub(r"\1\2", TEXT), encoding="utf-8")
    again = load(path, environ={}).servers
    assert again.daemon == loaded.servers.daemon
    assert again.servers["chat"] == loaded.servers.servers["chat"]


def test_it_carries_the_line_that_editors_read() -> None:
    assert TEXT.startswith("# yaml-language-server: $schema=")


def test_it_names_every_scheme_and_policy(loaded: Loaded) -> None:
    names = {*ALIASES, *CACHE_TYPES, *KEY_CODEC_NAMES, *loaded.policies} - {"f16"}
    assert [name for name in sorted(names) if name not in TEXT] == []
