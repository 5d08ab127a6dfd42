"""A real worker process over a real channel: what the supervisor may rely on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from daemon.config.wire import Ack, Drain, Fatal, Hello, Live, Progress, Ready, Snapshot
from daemon.worker.serve import HEARTBEAT_S, SNAPSHOT_S
from tests.worker.child_process import REAL, ROOT, Child, child, ready_child
from tests.worker.specs import worker_spec

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
ENDLESS = HELLO | {"ignore_eos": True}
OFTEN = {"stall": "4s"}  # an idle worker says four times in this long that it lives


def start_stream(worker: Child, body: dict[str, Any] = ENDLESS) -> Any:
    """Start a stream and return its response once the first token has come."""
    response = worker.http("POST", CHAT, body)
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


def last_data(body: bytes) -> str:
    return body.decode().rstrip("\n").split("\n\n")[-1].removeprefix("data: ")


def test_hello_progress_ready_and_snapshots_come_in_this_order() -> None:
    with child(worker_spec(probe=OFTEN)) as worker:
        hello = worker.receive()
        assert hello == Hello(nonce="nonce-1", pid=worker.process.pid)
        ready, progress = worker.until(Ready)
        assert [type(message) for message in progress] == [Progress] * len(progress)
        assert [message.fraction for message in progress] == [0.0, 1.0]  # type: ignore[attr-defined]
        assert (ready.nonce, ready.spec_hash) == ("nonce-1", "abcd1234")
        assert ready.kv.effective == {"turbo8v4": 4}
        first, second = worker.receive(), worker.receive()
        assert isinstance(first, Snapshot)
        assert isinstance(second, Snapshot)
        assert second.generation > first.generation


def test_nothing_heavy_is_imported_before_the_hello() -> None:
    heavy = {"aiohttp", "mlx", "mlx_lm", "transformers"}
    program = f"import sys, daemon.worker.main; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT)
    assert result.stdout == b"set()\n"


def test_drain_finishes_the_running_stream_refuses_new_requests_and_exits_with_0(
    tmp_path: Path,
) -> None:
    finish = tmp_path / "finish"
    with ready_child(worker_spec(labels={"held_until": str(finish)})) as worker:
        stream = start_stream(worker, HELLO)
        worker.send(Drain(timeout_s=60))
        refused = worker.http("GET", "/readyz")
        while refused.status == 200:
            refused.read()
            refused = worker.http("GET", "/readyz")
        late = worker.http("POST", CHAT, HELLO)
        assert late.status == 503
        assert json.load(late)["error"]["code"] == "server_draining"
        assert 1 <= int(late.headers["Retry-After"]) <= 30
        finish.touch()
        assert last_data(stream.read()) == "[DONE]"
        assert worker.exit_code() == 0


def test_a_drain_that_runs_out_of_time_tells_the_stream_and_exits_with_0() -> None:
    with ready_child(worker_spec(labels={"step_s": "0.05"})) as worker:
        stream = start_stream(worker)
        worker.send(Drain(timeout_s=0.2))
        body = stream.read()
        assert json.loads(last_data(body))["error"]["code"] == "server_draining"
        assert b'"finish_reason":"' not in body
        assert worker.exit_code() == 0


def test_sigterm_drains_the_running_stream_and_exits_with_0() -> None:
    with ready_child(worker_spec(labels={"step_s": "0.05"}, drain_timeout="20s")) as worker:
        stream = start_stream(worker, HELLO)
        worker.process.send_signal(signal.SIGTERM)
        assert last_data(stream.read()) == "[DONE]"
        assert worker.exit_code() == 0


def test_sigterm_while_loading_exits_with_0_at_once() -> None:
    with child(worker_spec(labels={"load_s": "25"})) as worker:
        worker.until(Progress)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.exit_code() == 0


def test_sigint_is_left_to_the_supervisor() -> None:
    with ready_child(worker_spec()) as worker:
        worker.process.send_signal(signal.SIGINT)
        assert worker.http("GET", "/livez").status == 200


def test_the_end_of_the_lease_ends_the_worker() -> None:
    with ready_child(worker_spec()) as worker:
        worker.lose_lease()
        assert worker.exit_code() == 0


def test_the_end_of_the_lease_ends_a_worker_that_loads() -> None:
    with child(worker_spec(labels={"load_s": "25"})) as worker:
        worker.until(Progress)
        worker.lose_lease()
        assert worker.exit_code() == 0


def test_an_engine_failure_fails_the_stream_tells_why_and_exits_with_70() -> None:
    with ready_child(worker_spec(labels={"fail_after": "3"})) as worker:
        response = worker.http("POST", CHAT, ENDLESS)
        body = response.read()
        error = json.loads(last_data(body))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        assert b"[DONE]" not in body
        fatal, _ = worker.until(Fatal)
        assert fatal.code == 70
        assert "scripted failure" in fatal.message
        assert worker.exit_code() == 70


@pytest.mark.parametrize(
    ("load", "code", "message"),
    [
        ("missing", 66, "no model there"),
        ("policy", 78, "this model cannot have it"),
        ("crash", 70, "ZeroDivisionError"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told_with_its_exit_code(
    load: str, code: int, message: str
) -> None:
    with child(worker_spec(labels={"load": load})) as worker:
        fatal, _ = worker.until(Fatal)
        assert fatal.code == code
        assert message in fatal.message
        assert worker.exit_code() == code
        assert message in worker.stderr()


@pytest.mark.parametrize(
    "line", [b"no json\n", b'{"type": "drain", "timeout_s": 1}\n', b'{"type": "spec"}\n']
)
def test_a_bad_spec_exits_with_78(line: bytes) -> None:
    with child(line, REAL) as worker:
        fatal, before = worker.until(Fatal)
        assert (fatal.code, before) == (78, [])
        assert worker.exit_code() == 78
        assert len(worker.stderr().splitlines()) == 1


def test_a_spec_of_another_protocol_exits_with_78() -> None:
    spec = worker_spec().model_copy(update={"protocol": 99})
    with child(spec, REAL) as worker:
        fatal, _ = worker.until(Fatal)
        assert "protocol 99" in fatal.message
        assert worker.exit_code() == 78


def test_a_supervisor_that_dies_before_the_spec_leaves_no_worker() -> None:
    with child(None, REAL) as worker:
        worker.lose_lease()
        assert worker.exit_code() == 0


def test_http_answers_503_with_progress_while_loading() -> None:
    with child(worker_spec(labels={"load_s": "25"})) as worker:
        worker.until(Progress)
        health = worker.http("GET", "/health")
        assert health.status == 503
        assert json.load(health)["error"]["message"] == "Loading model"
        refused = worker.http("POST", CHAT, HELLO)
        assert refused.status == 503
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        error = json.load(refused)["error"]
        assert error["code"] == "model_loading"
        assert error["progress"] == {"stage": "weights", "fraction": 0.0}
        assert worker.http("GET", "/livez").status == 200


def test_requests_during_a_load_never_wedge_the_worker() -> None:
    """B40: ten requests fired while the model loads all get an answer, and later ones are served."""
    with child(worker_spec(labels={"load_s": "0.5"})) as worker:
        worker.until(Progress)
        statuses: list[int] = []

        def fire() -> None:
            statuses.append(worker.http("POST", CHAT, HELLO).status)

        threads = [threading.Thread(target=fire) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(statuses) == 10
        assert set(statuses) <= {200, 503}
        worker.until(Ready)
        assert worker.http("POST", CHAT, HELLO).status == 200


def test_a_live_change_is_acknowledged_and_in_force() -> None:
    spec = worker_spec()
    with ready_child(spec) as worker:
        changed = spec.server.model_copy(update={"aliases": ("fresh",)})
        worker.send(Live(spec_hash="efgh", server=changed, api_key="secret"))
        ack, _ = worker.until(Ack)
        assert ack.spec_hash == "efgh"
        assert worker.http("GET", "/v1/models").status == 401
        assert json.load(worker.http("GET", "/readyz"))["spec_hash"] == "efgh"


def test_snapshots_count_what_happened() -> None:
    with ready_child(worker_spec()) as worker:
        assert worker.http("POST", CHAT, HELLO).read().endswith(b"[DONE]\n\n")
        snapshot, _ = worker.until(Snapshot)
        while snapshot.requests_total == 0:
            snapshot, _ = worker.until(Snapshot)
        assert snapshot.requests_total == 1
        assert snapshot.generation_tokens_total > 0
        assert snapshot.errors_total == snapshot.rejected_total == snapshot.cancelled_total == 0


def test_counts_of_requests_are_pushed_when_they_change_and_once_more_at_the_end() -> None:
    """An idle worker costs the supervisor little, and what a drain finishes is not lost."""
    with ready_child(worker_spec(labels={"step_s": "0.02"}, probe=OFTEN)) as worker:
        first, second = worker.receive(), worker.receive()
        assert isinstance(first, Snapshot)
        assert isinstance(second, Snapshot)
        assert first.requests is not None
        assert (first.requests.answered, second.requests) == ({}, None)
        response = start_stream(worker, HELLO)
        worker.send(Drain(timeout_s=20))
        response.read()
        assert worker.exit_code() == 0
        told = [it for it in iter(worker.receive, None) if isinstance(it, Snapshot) and it.requests]
        assert told[-1].requests is not None
        assert told[-1].requests.answered == {CHAT: {"200": 1}}


def test_a_worker_at_rest_pushes_nothing_but_that_it_lives() -> None:
    """Seldom, so that many idle workers cost the supervisor little."""
    with ready_child(worker_spec()) as worker:
        first, second = worker.receive(), worker.receive()
        assert isinstance(first, Snapshot)
        assert isinstance(second, Snapshot)
        looks = second.generation - first.generation  # the fake engine passes when it is looked at
        assert 1 < looks <= HEARTBEAT_S / SNAPSHOT_S


def test_a_worker_outlives_the_reader_of_its_output() -> None:
    with ready_child(worker_spec()) as worker:
        assert worker.process.stderr is not None
        worker.process.stderr.close()
        for _ in range(3):
            assert worker.http("POST", CHAT, HELLO).read().endswith(b"[DONE]\n\n")
        worker.send(Drain(timeout_s=1))
        assert worker.exit_code() == 0


def test_a_supervisor_that_stops_reading_stops_no_tokens() -> None:
    """Nobody reads the channel here; only the messages already queued may be lost."""
    with ready_child(worker_spec()) as worker:
        for _ in range(5):
            assert worker.http("POST", CHAT, HELLO).read().endswith(b"[DONE]\n\n")


def test_nothing_secret_or_private_reaches_the_log() -> None:
    with child(worker_spec(api_key="s3cret-key")) as worker:
        worker.until(Ready)
        body = {"messages": [{"role": "user", "content": "private words"}]}
        assert worker.http("POST", CHAT, body).status == 401
        worker.send(Drain(timeout_s=1))
        assert worker.exit_code() == 0
        log = worker.stderr()
        assert "request.finished" in log
        assert "s3cret-key" not in log
        assert "private words" not in log


def test_what_was_loaded_and_every_warning_about_it_is_one_line_of_the_log() -> None:
    with child(worker_spec(labels={"warning": "the metal kernels fail"})) as worker:
        worker.until(Ready)
        worker.send(Drain(timeout_s=1))
        assert worker.exit_code() == 0
        lines = [json.loads(line) for line in worker.stderr().splitlines() if line.startswith("{")]

    (resolved,) = [line for line in lines if line["event"] == "policy.resolved"]
    assert (resolved["kv"], resolved["packing"]) == ("turbo8v4 on 4 of 4 layers", "mlx")
    (warned,) = [line for line in lines if line["level"] == "warning"]
    assert (warned["event"], warned["warning"]) == ("policy.warned", "the metal kernels fail")
