"""What reaches a worker of its server's entry, over the channel and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.config import wire
from daemon.config.handover import live_message, worker_spec
from daemon.config.load import load
from daemon.config.machine import Machine
from daemon.config.prepare import PreparedServer, prepare
from daemon.paths import StateDir

MakeModel = Callable[..., Path]
PrepareOne = Callable[[str], PreparedServer]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareOne:
    """Prepare the server `chat`, written as its line under `servers:`."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def prepare_one(line: str) -> PreparedServer:
        path = tmp_path / "servers.yaml"
        path.write_text(f"version: 1\nservers:\n  {line}\n")
        loaded = load(path, environ={})
        state = StateDir(tmp_path / "state")
        return prepare(loaded, state=state, on=Machine(2**36)).servers["chat"]

    return prepare_one


def test_the_worker_gets_all_it_needs_as_one_line_of_json(
    prepared: PrepareOne, make_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "m")
    server = prepared(
        "chat: {model: m, port: 1, api_key: k, aliases: [a], env: {A: b}, drain_timeout: 1500ms,"
        ' kv: {layers: [{match: [0, 1], mode: fp16}, {match: "last:1", v: int8}]}}'
    )
    spec = worker_spec(server, launch=3, nonce="n", log_level="debug", memory_limit_bytes=5)
    again = wire.to_worker.validate_json(wire.encode(spec))
    assert again == spec
    assert (spec.launch, spec.nonce, spec.log_level, spec.memory_limit_bytes) == (
        3,
        "n",
        "debug",
        5,
    )
    assert (spec.model_path, spec.api_key, spec.spec_hash) == (str(folder), "k", server.spec_hash)
    assert spec.server.max_context == 4096  # as planned: the worker does not choose another
    message = live_message(server)
    assert wire.to_worker.validate_json(wire.encode(message)) == message
    assert message.server == spec.server


def test_a_server_without_a_model_has_no_worker(prepared: PrepareOne) -> None:
    server = prepared("chat: {model: org/absent, port: 1}")
    with pytest.raises(ValueError, match="no model"):
        worker_spec(server, launch=1, nonce="n")
