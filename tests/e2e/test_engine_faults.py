"""A real worker whose generation loop dies or hangs in the middle of a stream (C21)."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Site

FAULTY_WORKER = Path(__file__).parent / "faulty_worker.py"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_c21_a_dead_or_hung_engine_ends_its_streams_and_is_replaced(
    site: Site, demo_model_path: Path, fault: str
) -> None:
    trigger = site.folder / "fault"
    site.environment |= {
        "TQD_WORKER_COMMAND": f"{sys.executable} {FAULTY_WORKER}",
        "FAULT": str(trigger),
    }
    port = site.add(
        "a",
        model=str(demo_model_path),
        max_context=256,
        kv={"mode": "fp16"},
        probe={"interval": "1s", "stall": "4s"},
        stop_grace="8s",
    )
    site.write()
    site.run()
    site.until(lambda: site.server("a")["state"] == "ready", "the worker is ready", 120)

    stream = ask(port)
    assert stream.readline().startswith(b"data: ")
    trigger.write_text(fault)
    rest = stream.read()

    assert b'"error"' in rest
    assert b"[DONE]" not in rest
    site.until(
        lambda: site.server("a")["launch"] == 2 and site.server("a")["state"] == "ready",
        "another worker is ready",
        120,
    )
    last = site.server("a")["last_exit"]
    assert last is not None
    # a thread that hangs inside a computation may not hear SIGTERM: then the grace ends it
    expected = {"raise": {"engine_failed"}, "hang": {"stalled", "killed_after_grace"}}
    assert last["classified"] in expected[fault]
    assert b"[DONE]" in ask(port).read()


def ask(port: int) -> urllib.request.Request:
    body = {
        "model": "a",
        "stream": True,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Count to one hundred."}],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=120)
