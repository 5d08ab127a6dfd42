"""The application over a real socket: routes, refusals, headers, and what a worker tells about itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO, StringIO
from typing import Any

import pytest
from openai.types import Model

from daemon import log
from daemon.config.wire import Live
from daemon.worker.serving import Phase
from tests.worker.fake_engine import MAX_CONTEXT, Script, fake_loaded
from tests.worker.live_app import CHAT, HELLO, TEXT, live_app, until

OPEN = ["/", "/health", "/healthz", "/livez", "/readyz"]
GUARDED = ["/v1/models", "/v1/models/chat", "/models", "/props", "/v1/cache/stats"]
PAGE = {"Origin": "http://localhost:3000"}


@pytest.fixture
def lines() -> Iterator[Any]:
    """The lines of the log, read when called."""
    stream = StringIO()
    log.configure(level="debug", fmt="json", stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.configure()


@pytest.mark.parametrize("path", OPEN + GUARDED)
async def test_every_get_route_answers_json(path: str) -> None:
    async with live_app() as app:
        answer = await app.get(path)
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("application/json")
        assert isinstance(answer.json, dict)
        head = await app.request("HEAD", path)
        assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_routes_work_without_the_prefix_too(path: str) -> None:
    async with live_app() as app:
        assert (await app.post(path, {"messages": HELLO, "prompt": "The"})).status == 200


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_an_unknown_url_is_a_404_object(method: str) -> None:
    """B30."""
    async with live_app() as app:
        answer = await app.request(method, "/v1/nowhere")
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")
        assert answer.error["message"] == f"Unknown request URL: {method} /v1/nowhere."


async def test_a_doubled_prefix_is_named() -> None:
    async with live_app() as app:
        assert "/v1 twice" in (await app.post("/v1/v1/chat/completions")).error["message"]


async def test_a_wrong_method_is_a_405_object_that_keeps_allow() -> None:
    async with live_app() as app:
        answer = await app.get(CHAT)
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        assert answer.error["type"] == "invalid_request_error"
        assert "POST" in (await app.get(CHAT)).error["message"]


async def test_a_body_of_megabytes_is_fine_and_one_beyond_the_limit_is_a_413_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with live_app() as app:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 2**21}]}).encode()
        answer = await app.post(CHAT, data=BytesIO(body))
        assert answer.error["code"] == "context_length_exceeded"
    monkeypatch.setattr("daemon.worker.app.MAX_BODY_BYTES", 1000)
    async with live_app() as app:
        answer = await app.post(CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]})
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")


async def test_the_models_list_has_the_names_of_the_server_and_no_paths() -> None:
    async with live_app(model="/home/someone/models/small-4bit") as app:
        answer = await app.get("/v1/models")
        models = [Model.model_validate(entry, strict=True) for entry in answer.json["data"]]
        assert [model.id for model in models] == ["chat", "small"]
        assert answer.json["object"] == "list"
        assert answer.json["data"][0]["max_model_len"] == MAX_CONTEXT
        props = await app.get("/props")
        assert props.json["model_path"] == "small-4bit"
        assert b"someone" not in answer.body + props.body


@pytest.mark.parametrize("name", ["chat", "small", "org/small-model", "org%2Fsmall-model"])
async def test_a_model_can_be_asked_for_by_each_of_its_names(name: str) -> None:
    async with live_app() as app:
        answer = await app.get(f"/v1/models/{name}")
        assert answer.json["id"] == name.replace("%2F", "/")


async def test_another_model_is_not_found() -> None:
    async with live_app() as app:
        answer = await app.get("/v1/models/org/other")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_models_are_listed_while_loading() -> None:
    async with live_app(loaded=False) as app:
        answer = await app.get("/v1/models")
        assert [entry["id"] for entry in answer.json["data"]] == ["chat", "small"]


@pytest.mark.parametrize("path", ["/health", "/readyz", "/props"])
async def test_while_loading_health_and_readiness_say_503_with_progress(path: str) -> None:
    async with live_app(loaded=False) as app:
        app.serving.progress = ("weights", 0.5)
        answer = await app.get(path)
        assert answer.status == 503
        assert 1 <= int(answer.headers["Retry-After"]) <= 30
        if path == "/health":
            assert answer.error == {
                "code": 503,
                "message": "Loading model",
                "type": "unavailable_error",
            }
            assert answer.json["progress"] == {"stage": "weights", "fraction": 0.5}


@pytest.mark.parametrize("path", ["/livez", "/v1/cache/stats"])
async def test_liveness_and_cache_stats_answer_while_loading(path: str) -> None:
    async with live_app(loaded=False) as app:
        assert (await app.get(path)).status == 200


async def test_readiness_tells_who_answers_and_that_the_engine_moves() -> None:
    async with live_app() as app:
        first = (await app.get("/readyz")).json
        second = (await app.get("/readyz")).json
        assert (first["nonce"], first["spec_hash"]) == ("nonce-1", "abcd1234")
        assert second["generation"] > first["generation"]


async def test_an_engine_that_does_not_move_is_not_ready() -> None:
    async with live_app(probe={"stall": "1ms"}) as app:
        app.engine.frozen = 7
        app.serving.snapshot()
        await until(lambda: app.serving.stalled)
        answer = await app.get("/readyz")
        assert (answer.status, answer.json["status"]) == (503, "stalled")
        assert (await app.get("/livez")).status == 200


async def test_a_model_of_which_nothing_grows_has_no_bits_a_value() -> None:
    async with live_app(loaded=False) as app:
        loaded = fake_loaded(app.serving.spec, app.engine)
        nothing = {"bytes_per_token": 0.0, "bytes_per_token_fp16": 0.0}
        app.serving.load(replace(loaded, kv=loaded.kv.model_copy(update=nothing)))

        assert (await app.get("/v1/cache/stats")).json["kv_bits"] is None


async def test_properties_and_cache_stats_tell_the_effective_kv_mode() -> None:
    async with live_app(Script(queued_s=60)) as app:
        props, stats = (await app.get("/props")).json, (await app.get("/v1/cache/stats")).json
        for document in (props, stats):
            assert document["kv_cache_mode_requested"] == "turbo8v4"
            assert document["kv_cache_mode"] == "turbo8v4"
            assert document["kv_bits"] == 6.25
        assert props["default_generation_settings"]["n_ctx"] == MAX_CONTEXT
        assert props["default_generation_settings"]["params"]["temperature"] == 1.0
        assert props["total_slots"] == 8
        assert stats["prompt_cache"] == {"enabled": False}
        assert stats["kv"]["bytes_per_token"] == 100.0
        assert stats["kv"]["bytes"] == 0
        assert (props["kv"]["bytes"], props["kv"]["tokens"]) == (0, 0)


@pytest.mark.parametrize("path", [CHAT, TEXT, *GUARDED])
async def test_without_the_key_there_is_nothing(path: str) -> None:
    async with live_app(api_key="s3cret") as app:
        method = "POST" if path in (CHAT, TEXT) else "GET"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": ""}):
            answer = await app.request(method, path, headers=headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        for headers in ({"Authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
            assert (await app.request(method, path, headers=headers)).status != 401


@pytest.mark.parametrize("path", OPEN)
async def test_health_needs_no_key(path: str) -> None:
    async with live_app(api_key="s3cret") as app:
        assert (await app.get(path)).status == 200


async def test_a_new_key_is_in_force_at_once() -> None:
    async with live_app(api_key="old") as app:
        app.serving.apply(Live(spec_hash="new", server=app.serving.server, api_key="fresh"))
        assert (await app.chat(headers={"x-api-key": "old"})).status == 401
        headers = {"x-api-key": "fresh"}
        assert (await app.post(CHAT, {"messages": HELLO}, headers=headers)).status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/nowhere"])
async def test_a_preflight_needs_no_key_and_names_authorization(path: str) -> None:
    """B32."""
    async with live_app(api_key="s3cret") as app:
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
            "Access-Control-Request-Private-Network": "true",
        }
        answer = await app.request("OPTIONS", path, headers=PAGE | asked)
        assert (answer.status, answer.body) == (204, b"")
        assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]
        assert answer.headers["Access-Control-Allow-Private-Network"] == "true"


@pytest.mark.parametrize(
    ("body", "status"),
    [({"messages": HELLO}, 200), ({"messages": HELLO, "stream": True}, 200), ({}, 400)],
)
async def test_answers_streams_and_errors_carry_cors_headers(
    body: dict[str, Any], status: int
) -> None:
    async with live_app() as app:
        answer = await app.post(CHAT, body, headers=PAGE)
        assert answer.status == status
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]
        assert answer.headers["Vary"] == "Origin"


async def test_a_401_carries_cors_headers() -> None:
    """B32: without them a page sees a network error instead."""
    async with live_app(api_key="s3cret") as app:
        answer = await app.post(CHAT, {"messages": HELLO}, headers=PAGE)
        assert answer.status == 401
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]


async def test_a_foreign_page_can_neither_read_nor_use_the_server() -> None:
    async with live_app() as app:
        headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        used = await app.post(CHAT, data=json.dumps({"messages": HELLO}), headers=headers)
        assert (used.status, used.error["code"]) == (403, "origin_not_allowed")
        read = await app.get("/v1/models", headers=headers)
        assert "Access-Control-Allow-Origin" not in read.headers
        assert not app.engine.submitted


@pytest.mark.parametrize("path", ["/v1/models", "/health", CHAT])
async def test_a_rebound_name_is_refused(path: str) -> None:
    async with live_app() as app:
        answer = await app.get(path, headers={"Host": "evil.example"})
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
        assert "allowed_hosts" in answer.error["message"]


async def test_a_configured_name_is_answered() -> None:
    async with live_app(allowed_hosts=["box.lan"]) as app:
        assert (await app.get("/health", headers={"Host": "box.lan:8001"})).status == 200


async def test_a_request_id_is_echoed_when_it_is_sane_and_made_otherwise() -> None:
    async with live_app() as app:
        sane = await app.get("/health", headers={"x-request-id": "trace-1.a:b"})
        assert sane.headers["x-request-id"] == "trace-1.a:b"
        for odd in ("", "x" * 200, "a b", "é"):
            made = (await app.get("/health", headers={"x-request-id": odd})).headers["x-request-id"]
            assert made.startswith("req_")


@pytest.mark.parametrize(
    ("phase", "message"), [(Phase.DRAINING, "Shutting down"), (Phase.FAILED, "Engine failed")]
)
async def test_health_of_a_worker_that_ends_says_so_and_shows_no_load_progress(
    phase: Phase, message: str
) -> None:
    """Even when it ends before its model was loaded."""
    async with live_app(loaded=False) as app:
        app.serving.progress = ("weights", 0.4)
        app.serving.phase = phase
        answer = await app.get("/health")
        assert answer.status == 503
        assert answer.json == {
            "status": phase.value,
            "error": {"code": 503, "message": message, "type": "unavailable_error"},
        }


async def test_a_draining_worker_closes_its_connections() -> None:
    async with live_app() as app:
        app.serving.phase = Phase.DRAINING
        answer = await app.chat()
        assert (answer.status, answer.headers["Connection"]) == (503, "close")


async def test_a_request_is_one_line_with_its_numbers_and_no_text(lines: Any) -> None:
    async with live_app() as app:
        messages = [{"role": "user", "content": "private words"}]
        await app.post(CHAT, {"messages": messages}, headers={"x-request-id": "trace-1"})
        (line,) = lines()
        assert line["event"] == "request.finished"
        assert (line["route"], line["status"], line["request_id"]) == (CHAT, 200, "trace-1")
        assert line["prompt_tokens"] == len(app.engine.submitted[0].prompt)
        assert line["completion_tokens"] == 8
        assert 0 < line["ttft_ms"] <= line["duration_ms"]
        assert "private" not in json.dumps(line)
        assert "Paris" not in json.dumps(line)


async def test_the_line_of_a_failed_stream_has_its_code(lines: Any) -> None:
    async with live_app(Script(fail_after=2)) as app:
        await app.chat(stream=True)
        (line,) = lines()
        assert (line["status"], line["code"]) == (500, "engine_failed")


async def test_the_line_of_a_client_that_left_says_so(lines: Any) -> None:
    async with live_app(Script(queued_s=60)) as app:
        async with app.session.post(app.url + CHAT, json={"messages": HELLO, "stream": True}):
            pass
        await until(lines)
        (line,) = lines()
        assert (line["status"], line["completion_tokens"]) == (499, 0)


async def test_polls_are_quiet_unless_they_are_refused(lines: Any) -> None:
    async with live_app(api_key="s3cret") as app:
        await app.get("/health")
        await app.get("/props")
        assert [line["level"] for line in lines()] == ["debug", "info"]


async def test_a_snapshot_tells_open_requests_by_id_and_tokens_and_never_a_prompt() -> None:
    body = {"messages": HELLO, "stream": True, "max_tokens": 400, "ignore_eos": True}
    async with live_app(Script(step_s=0.01)) as app:
        assert app.serving.snapshot().open == ()
        asking = asyncio.create_task(app.post(CHAT, body, headers={"x-request-id": "mine"}))
        await until(lambda: any(it.completion_tokens for it in app.serving.snapshot().open))
        (found,) = app.serving.snapshot().open
        assert (found.id, found.stream, found.prompt_tokens > 0) == ("mine", True, True)
        assert "Say hi" not in app.serving.snapshot().model_dump_json()
        asking.cancel()
        await until(lambda: app.serving.snapshot().open == ())
