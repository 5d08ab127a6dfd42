"""A real worker whose generation loop dies or hangs in the middle of a stream (C21)."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.worker.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from tests.e2e.conftest import Site

FAULTY_WORKER = Path(__file__).parent / "faulty_worker.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "probe", "classified"),
    [
        ("raise", {}, {"engine_failed"}),
        # a thread that hangs inside a computation may not hear SIGTERM: then the grace ends it
        ("hang", {"interval": "1s", "stall": "4s"}, {"stalled", "killed_after_grace"}),
    ],
)
def test_c21_a_dead_or_hung_engine_ends_its_streams_and_is_replaced(
    site: Site, fault: str, probe: dict[str, str], classified: set[str]
) -> None:
    trigger = site.folder / "fault"
    site.environment |= {
        "TQD_WORKER_COMMAND": f"{sys.executable} {FAULTY_WORKER}",
        "FAULT": str(trigger),
    }
    write_tiny_model(site.folder / "tiny")
    port = site.add("a", model="./tiny", kv={"mode": "fp16"}, probe=probe, stop_grace="8s")
    site.write()
    site.run()
    site.loaded("a")

    trigger.write_text(fault)
    cut = ask(port)
    assert b'"content"' in cut
    assert b'"error"' in cut
    assert b"[DONE]" not in cut

    site.loaded("a", launch=2)
    last = site.server("a")["last_exit"]
    assert last is not None
    assert last["classified"] in classified
    assert b"[DONE]" in ask(port)


def ask(port: int) -> bytes:
    """Return the whole of a stream of a hundred tokens, or what comes of it."""
    body = {
        "stream": True,
        "max_tokens": 100,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Count to one hundred."}],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return bytes(answer.read())
