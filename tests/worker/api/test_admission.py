"""More requests than places: some wait, the rest hear when to come back."""

from __future__ import annotations

import asyncio

from daemon.config.wire import Live
from daemon.worker.requests import QueueFullError, TooLargeError
from tests.worker.fake_engine import Script
from tests.worker.live_app import live_app, until


async def test_beyond_the_queue_requests_get_429_with_retry_after() -> None:
    """B34."""
    go = asyncio.Event()
    script = Script(held=lambda _: not go.is_set())
    async with live_app(script, max_concurrent=2, queue=3) as app:
        asking = asyncio.gather(*(app.chat() for _ in range(20)))
        await until(lambda: app.serving.counters.rejected == 20 - 2 - 3)
        go.set()
        answers = await asking
        refused = [answer for answer in answers if answer.status == 429]
        assert len(refused) == 20 - 2 - 3
        for answer in refused:
            assert 1 <= int(answer.headers["Retry-After"]) <= 30
            assert (answer.error["type"], answer.error["code"]) == (
                "rate_limit_error",
                "queue_full",
            )
        assert {answer.status for answer in answers} == {200, 429}
        assert app.serving.counters.rejected == 15


async def test_choices_that_do_not_all_fit_leave_none_behind() -> None:
    go = asyncio.Event()
    script = Script(held=lambda _: not go.is_set())
    async with live_app(script, max_concurrent=2, queue=2) as app:
        first = asyncio.ensure_future(app.chat(n=2))
        await until(lambda: len(app.engine.open) == 2)
        second = await app.chat(n=3)
        assert second.status == 429
        assert len(app.engine.submitted) == 4
        go.set()
        await first
        assert not app.engine.open


async def test_limits_change_while_running() -> None:
    async with live_app(max_concurrent=1, queue=0) as app:
        spec = app.serving.spec
        server = spec.server.model_copy(update={"max_concurrent": 4, "queue": 7})
        app.serving.apply(Live(spec_hash="new", server=server, api_key=None))
        assert (app.engine.max_concurrent, app.engine.queue) == (4, 7)
        assert (await app.get("/props")).json["total_slots"] == 4


async def test_a_request_that_can_never_fit_gets_400_and_says_what_would() -> None:
    async with live_app() as app:
        app.engine.refusal = TooLargeError(tokens=900, needed_bytes=3 * 2**20, limit_bytes=2**20)
        answer = await app.chat()
        assert answer.status == 400
        assert (answer.error["code"], answer.error["param"]) == (
            "insufficient_memory",
            "max_tokens",
        )
        assert answer.error["message"] == (
            "This request may grow to 900 tokens, whose cache takes 3.0 MiB; this server has 1.0 MiB for"
            " all requests. Send a shorter prompt or a smaller max_tokens."
        )


async def test_while_others_hold_the_memory_a_full_line_says_so() -> None:
    async with live_app() as app:
        app.engine.refusal = QueueFullError(7, for_memory=True)
        answer = await app.chat()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
        assert answer.error["code"] == "memory_full"
        assert "memory that running requests hold" in answer.error["message"]


async def test_a_share_of_the_memory_is_live_and_what_is_promised_is_told() -> None:
    async with live_app() as app:
        serving = app.serving
        assert (
            serving.snapshot().memory_promised_bytes == 1000
        )  # its weights: nobody counts the rest
        live = Live(spec_hash="h", server=serving.server, memory_limit_bytes=5000)
        serving.apply(live)
        assert (app.engine.memory_limit_bytes, app.engine.kv_limit_bytes) == (5000, 4000)
        assert serving.snapshot().memory_promised_bytes == 5000
        # a lower share is in force only when the engine goes by it
        serving.apply(live.model_copy(update={"memory_limit_bytes": 3000}))
        app.engine.kv_limit_bytes = 4000
        assert serving.snapshot().memory_promised_bytes == 5000
        app.engine.kv_limit_bytes = 2000
        assert serving.snapshot().memory_promised_bytes == 3000
