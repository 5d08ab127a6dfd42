from __future__ import annotations

import json
from pathlib import Path

from daemon.config.load import load
from daemon.ops.applied import HIDDEN, AppliedConfig, applied

TEXT = """\
version: 1
daemon: {status: null}
defaults:
  labels: {team: "${env:TEAM}"}
servers:
  chat:
    model: ./model
    port: 8081
    aliases: [gpt, "${env:SECRET}"]
    api_key: ${env:SECRET}
    env: {TOKEN: hunter2, PLAIN: "1"}
    kv:
      mode: turbo8v4
"""


def document(folder: Path) -> AppliedConfig:
    file = folder / "servers.yaml"
    file.write_text(TEXT)
    return applied(load(file, environ={"SECRET": "hunter2", "TEAM": "hunter2"}), generation=7)


def test_every_value_is_there_and_written_ones_say_where(tmp_path: Path) -> None:
    found = document(tmp_path)
    chat = found["servers"]["chat"]
    assert (found["generation"], found["files"]) == (7, [str(tmp_path / "servers.yaml")])
    assert chat["place"] == f"{tmp_path}/servers.yaml:6"
    assert (chat["values"]["port"], chat["values"]["drain_timeout"]) == (8081, "30s")
    assert chat["places"]["port"] == f"{tmp_path}/servers.yaml:8"
    assert chat["places"]["kv.mode"] == f"{tmp_path}/servers.yaml:13"
    assert "drain_timeout" not in chat["places"]
    assert found["daemon"]["values"]["max_parallel_loads"] == 1


def test_secrets_and_what_the_environment_gave_are_hidden(tmp_path: Path) -> None:
    found = document(tmp_path)
    assert "hunter2" not in json.dumps(found)
    values = found["servers"]["chat"]["values"]
    assert (values["api_key"], values["env.TOKEN"], values["env.PLAIN"]) == (HIDDEN,) * 3
    assert (values["labels.team"], values["aliases"]) == (HIDDEN, ["gpt", HIDDEN])
