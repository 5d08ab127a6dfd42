"""Server-sent events: framing, pings, failures in the middle, readers that stop reading."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from daemon.worker.api.sse import StreamTimes
from tests.worker.fake_engine import Script
from tests.worker.live_app import CHAT, HELLO, TEXT, Answer, LiveApp, live_app, until
from tests.worker.small_tokenizer import byte_token, small_tokenizer

BODIES = [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "The"})]
ENDLESS = {"messages": HELLO, "stream": True, "ignore_eos": True}


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_framing_is_the_one_that_clients_parse(path: str, body: dict[str, Any]) -> None:
    async with live_app() as app:
        answer = await app.post(path, body | {"stream": True})
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-cache"
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert "Content-Length" not in answer.headers
        assert answer.frames[-1] == "data: [DONE]"
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in answer.frames)


async def test_the_first_chunk_carries_the_role_and_nothing_else() -> None:
    async with live_app() as app:
        first = (await app.chat(stream=True)).events[0]["choices"][0]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert first["finish_reason"] is None


async def test_headers_leave_before_the_first_token() -> None:
    async with (
        live_app(Script(queued_s=60)) as app,
        app.session.post(app.url + CHAT, json=ENDLESS) as response,
    ):
        assert response.status == 200
        assert not app.engine.generated


async def test_pings_fill_a_long_silence_before_the_first_data() -> None:
    """B20."""
    go = asyncio.Event()
    script = Script(held=lambda _: not go.is_set())
    async with (
        live_app(script, times=StreamTimes(ping_s=0.01)) as app,
        app.session.post(app.url + CHAT, json={"messages": HELLO, "stream": True}) as response,
    ):
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        go.set()
        answer = Answer(response.status, response.headers, await response.read())
        assert answer.text == "The capital of France is Paris."


async def test_pings_go_on_while_one_step_is_stuck() -> None:
    """B21: the timer is the event loop's, not the engine's."""
    go = asyncio.Event()
    script = Script(held=lambda tokens: tokens > 0 and not go.is_set())
    async with (
        live_app(script, times=StreamTimes(ping_s=0.01)) as app,
        app.session.post(app.url + CHAT, json={"messages": HELLO, "stream": True}) as response,
    ):
        await until(lambda: app.engine.generated)
        seen: list[bytes] = []
        while seen[-3:] != [b": ping\n\n"] * 3 or not any(it[:1] == b"d" for it in seen):
            seen.append(await response.content.readuntil(b"\n\n"))
        go.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_failure_in_the_middle_is_an_error_event_and_no_finish(
    path: str, body: dict[str, Any]
) -> None:
    """B04, B33: the stream is complete as HTTP, its last frame is the error."""
    async with live_app(Script(fail_after=3)) as app:
        answer = await app.post(path, body | {"stream": True, "ignore_eos": True})
        assert answer.status == 200
        error = json.loads(answer.frames[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert error["message"]
        assert b"[DONE]" not in answer.body
        assert b'"finish_reason":"' not in answer.body
        assert app.serving.counters.errors == 1


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_failure_without_a_stream_is_a_500_object(path: str, body: dict[str, Any]) -> None:
    """B30: never a 404."""
    async with live_app(Script(fail_after=3)) as app:
        answer = await app.post(path, body | {"ignore_eos": True})
        assert (answer.status, answer.error["code"]) == (500, "engine_failed")


async def test_after_a_failure_requests_get_503_with_retry_after() -> None:
    async with live_app(Script(fail_after=1)) as app:
        await app.chat()
        answer = await app.chat()
        assert (answer.status, answer.error["code"]) == (503, "worker_unavailable")
        assert 1 <= int(answer.headers["Retry-After"]) <= 30


async def test_a_defect_of_ours_is_an_error_event_without_its_details(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("private detail")

    monkeypatch.setattr("daemon.worker.text.TextStream.feed", broken)
    async with live_app() as app:
        stream = await app.chat(stream=True)
        assert json.loads(stream.frames[-1].removeprefix("data: "))["error"]["code"] == (
            "internal_error"
        )
        whole = await app.chat()
        assert (whole.status, whole.error["code"]) == (500, "internal_error")
        assert b"private detail" not in stream.body + whole.body


async def test_invalid_bytes_do_not_end_a_stream() -> None:
    """B24."""
    bad = [byte_token(byte) for byte in b"\xf0\x9f\xff\x80"]
    good = small_tokenizer().encode(" Paris", add_special_tokens=False)
    async with live_app(Script(reply=[*bad, *good, *bad[:2]])) as app:
        answer = await app.chat(stream=True)
        assert "\ufffd" in answer.text
        assert " Paris" in answer.text
        assert answer.finishes == ["stop"]


async def test_characters_of_several_tokens_are_never_split() -> None:
    async with live_app(Script(reply=[byte_token(b) for b in "日本😀".encode()])) as app:
        answer = await app.chat(stream=True)
        parts = [e["choices"][0]["delta"].get("content") for e in answer.events]
        assert [part for part in parts if part] == ["日", "本", "😀"]


async def test_a_batch_of_tokens_is_one_chunk() -> None:
    async with live_app(Script(batch=4)) as app:
        answer = await app.chat(stream=True)
        assert answer.text == "The capital of France is Paris."
        assert len([e for e in answer.events if e["choices"][0]["delta"].get("content")]) == 2


async def test_a_reader_that_stops_reading_is_cut_off() -> None:
    """Its sequence ends although the connection never closes."""
    times = StreamTimes(send_timeout_s=0.2)
    async with live_app(Script(batch=64), times=times, send_buffer=4096) as app:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        with deaf:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, ("127.0.0.1", int(app.url.rpartition(":")[2])))
            body = json.dumps(ENDLESS | {"logprobs": True, "top_logprobs": 20}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(deaf, head.encode() + body)
            await until(lambda: app.serving.counters.cancelled == 1)
            assert not app.engine.open


@pytest.mark.parametrize("kind", ["whole", "error", "stream"])
async def test_every_answer_can_be_read_to_its_end(kind: str) -> None:
    """B33: no client sees a payload error, on one kept connection."""
    bodies = {"whole": {}, "error": {"n": 0}, "stream": {"stream": True}}
    async with live_app() as app:
        for _ in range(3):
            async with app.session.post(
                app.url + CHAT, json={"messages": HELLO} | bodies[kind]
            ) as response:
                assert await response.read()


async def interrupt_after_first_data(app: LiveApp, body: dict[str, Any]) -> bytes:
    async with app.session.post(app.url + CHAT, json=body) as response:
        await response.content.readline()
        app.serving.interrupt()
        return await response.read()


async def test_a_stream_that_runs_out_of_time_in_a_drain_is_told() -> None:
    async with live_app(Script(step_s=0.01)) as app:
        rest = await interrupt_after_first_data(app, ENDLESS)
        assert b'"code":"server_draining"' in rest
        assert not app.engine.open


async def test_a_request_that_runs_out_of_time_in_a_drain_gets_503() -> None:
    async with live_app(Script(queued_s=60)) as app:
        waiting = asyncio.ensure_future(app.chat())
        await until(lambda: app.engine.open)
        app.serving.interrupt()
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (503, "server_draining")
