from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.load import load
from daemon.errors import ConfigError

FILE = "version: 1\nservers:\n  chat: {{model: x, port: 8081, {written}}}\n"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("boundry_v: 3", "kv.boundary_v"),
        ("sink_tokens: 4", "kv.sink_tokens"),
        ("stop_grase: 3s", "stop_grace"),
        ("kv: {polcy: exact}", "policy"),
        ("backoff: [1s, 2s]", "restart.backoff"),
    ],
)
def test_the_key_that_was_meant_is_named_even_a_level_further_down(
    tmp_path: Path, written: str, meant: str
) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text(FILE.format(written=written))

    with pytest.raises(ConfigError) as refusal:
        load(path, environ={})

    assert [problem.hint for problem in refusal.value.problems] == [f"did you mean `{meant}`?"]
