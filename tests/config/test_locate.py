from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.config.locate import (
    Located,
    ModelFaultError,
    ModelMissingError,
    fingerprint,
    locate,
    read_config,
    read_weights,
)

MakeModel = Callable[..., Path]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sized(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.fixture
def hub(tmp_path: Path, make_model: MakeModel) -> Path:
    """A Hugging Face cache that holds org/name: main and the tag v1 at one commit."""
    repo = tmp_path / "hub" / "models--org--name"
    make_model(repo / "snapshots" / COMMIT)
    for ref in ("main", "v1", "refs/pr/1"):
        path = repo / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(COMMIT)
    return tmp_path / "hub"


@pytest.mark.parametrize("revision", [None, "", "main", "v1", "refs/pr/1", COMMIT])
def test_a_hub_id_is_found_in_the_cache(hub: Path, revision: str | None) -> None:
    located = locate("org/name", revision, hub=hub)
    assert located == Located(hub / "models--org--name" / "snapshots" / COMMIT, COMMIT)


@pytest.mark.parametrize("revision", ["v2", "../main", "..", "/etc", "a//b", "."])
def test_a_revision_that_is_not_there_is_missing(hub: Path, revision: str) -> None:
    with pytest.raises(ModelMissingError, match="at revision"):
        locate("org/name", revision, hub=hub)


def test_a_hub_id_that_is_not_there_is_missing(hub: Path) -> None:
    with pytest.raises(ModelMissingError, match="does not hold this hub id") as caught:
        locate("org/other", None, hub=hub)
    assert caught.value.hint
    assert "tqd pull" in caught.value.hint


def test_a_ref_cannot_lead_out_of_the_cache(hub: Path) -> None:
    (hub / "models--org--name" / "refs" / "main").write_text("../../../..")
    with pytest.raises(ModelMissingError):
        locate("org/name", None, hub=hub)


def test_a_download_without_config_is_missing(hub: Path) -> None:
    (hub / "models--org--name" / "snapshots" / COMMIT / "config.json").unlink()
    with pytest.raises(ModelMissingError, match=r"no config\.json"):
        locate("org/name", None, hub=hub)


def test_a_path_is_a_folder_with_a_config(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model(tmp_path / "m")
    assert locate(str(folder), None, hub=tmp_path) == Located(folder)
    with pytest.raises(ModelMissingError, match=f"there is no folder {tmp_path}/absent"):
        locate(str(tmp_path / "absent"), None, hub=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON: line 1"),
        (b"[]", "no JSON object"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b"", "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
    ],
)
def test_a_damaged_config_is_a_fault(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFaultError, match=message):
        read_config(tmp_path)


def test_weights_are_counted_from_the_files_that_are_loaded(
    tmp_path: Path, make_model: MakeModel
) -> None:
    folder = make_model(tmp_path / "m", weights=1000)
    (folder / "adapters.safetensors").write_bytes(b"not a weight file of the model")
    size = (folder / "model.safetensors").stat().st_size
    assert read_weights(folder).total_bytes == size
    assert read_weights(make_model(tmp_path / "n", weights=None)).files == ()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda content: b"", "cut short", id="empty"),
        pytest.param(lambda content: content[:20], "cut short", id="half a header"),
        pytest.param(lambda content: content[:-1], "its header describes", id="a byte short"),
        pytest.param(lambda content: content + b"x", "its header describes", id="a byte more"),
        pytest.param(
            lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "Git LFS pointer",
            id="pointer",
        ),
        pytest.param(lambda content: sized(b"not json"), "no safetensors header", id="no JSON"),
        pytest.param(lambda content: sized(b"[]"), "no safetensors header", id="no object"),
        pytest.param(lambda content: sized(b'{"a": {}}'), "no safetensors header", id="no offsets"),
    ],
)
def test_damaged_weights_are_a_fault_that_names_the_file(
    tmp_path: Path, make_model: MakeModel, damage: Callable[[bytes], bytes], message: str
) -> None:
    folder = make_model(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelFaultError, match=message) as caught:
        read_weights(folder)
    assert "model.safetensors" in caught.value.message


def test_a_file_of_the_index_that_is_not_there_is_missing(
    tmp_path: Path, make_model: MakeModel
) -> None:
    folder = make_model(tmp_path / "m")
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelMissingError, match=r"model-00002-of-00002\.safetensors is missing"):
        read_weights(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelFaultError, match="weight_map"):
        read_weights(folder)


def test_the_fingerprint_covers_everything_but_the_weights_themselves(
    tmp_path: Path, make_model: MakeModel
) -> None:
    folder = make_model(tmp_path / "m")
    same = fingerprint(Located(make_model(tmp_path / "copy")))
    assert fingerprint(Located(folder)) == same
    seen = {same, fingerprint(Located(folder, COMMIT))}
    for name, content in (("config.json", '{"a": 1}'), ("tokenizer.json", "[]")):
        before = (folder / name).read_text()
        (folder / name).write_text(content)
        seen.add(fingerprint(Located(folder)))
        (folder / name).write_text(before)
    seen.add(fingerprint(Located(make_model(tmp_path / "larger", weights=1001))))
    assert len(seen) == 5
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert fingerprint(Located(folder)) == same
