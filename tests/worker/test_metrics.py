"""The metrics page of a worker: every series moves with what it counts."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs

from daemon.config.wire import Snapshot
from daemon.worker.api.answers import Pace, Tally
from daemon.worker.metrics import RequestMetrics
from tests.metrics.lint import lint, value
from tests.worker.fake_engine import Script
from tests.worker.live_app import CHAT, HELLO, LiveApp, live_app, until


async def page(app: LiveApp, **headers: str) -> str:
    return (await app.get("/metrics", headers=headers)).body.decode()


def requests(text: str, code: str, endpoint: str = CHAT) -> float | None:
    return value(text, "tqd_requests_total", endpoint=endpoint, code=code)


async def test_the_page_is_clean_before_and_after_requests() -> None:
    async with live_app() as app:
        assert lint(await page(app)) == []
        await app.chat()
        assert lint(await page(app)) == []


async def test_a_worker_that_still_loads_has_a_page() -> None:
    async with live_app(loaded=False) as app:
        assert (await app.chat()).status == 503
        assert requests(await page(app), "503") == 1


async def test_every_series_of_requests_moves() -> None:
    async with live_app(Script(step_s=0.002)) as app:
        assert (await app.chat()).status == 200
        assert (await app.chat(stream=True)).status == 200
        assert (await app.chat(temperature=-1)).status == 400
        assert (await app.get("/nowhere")).status == 404
        text = await page(app)

    assert (requests(text, "200"), requests(text, "400")) == (2, 1)
    assert requests(text, "404", "unknown") == 1
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert value(text, f"tqd_{name}_seconds_count") == 2
        assert (value(text, f"tqd_{name}_seconds_sum") or 0) > 0
    assert (value(text, "tqd_prompt_tokens_total") or 0) > 0
    assert (value(text, "tqd_generation_tokens_total") or 0) > 2
    assert value(text, "tqd_kv_layers", mode="turbo8v4") == 4


async def test_running_requests_are_gauges_that_fall_again() -> None:
    go = asyncio.Event()
    async with live_app(Script(held=lambda _: not go.is_set())) as app:
        request = asyncio.create_task(app.chat())
        await until(lambda: app.engine.running)
        assert value(await page(app), "tqd_requests_running") == 1
        go.set()
        await request
        assert value(await page(app), "tqd_requests_running") == 0


async def test_a_client_that_leaves_counts_as_499() -> None:
    async with live_app(Script(held=lambda tokens: tokens > 0)) as app:
        async with app.session.post(
            app.url + CHAT, json={"messages": HELLO, "stream": True}
        ) as answer:
            await answer.content.readany()
        await until(lambda: app.serving.counters.cancelled)
        assert requests(await page(app), "499") == 1


async def test_scanners_cannot_make_new_labels() -> None:
    async with live_app() as app:
        for path in ("/a", "/b", "/v1/models/x", "/v1/models/y"):
            await app.get(path)
        text = await page(app)
    assert requests(text, "404", "unknown") == 2
    assert requests(text, "404", "/v1/models/{id}") == 2


async def test_the_page_needs_the_key_where_there_is_one() -> None:
    async with live_app(api_key="s3cret") as app:
        assert (await app.get("/metrics")).status == 401
        answer = await app.get("/metrics", headers={hdrs.AUTHORIZATION: "Bearer s3cret"})
        assert answer.headers[hdrs.CONTENT_TYPE].startswith("text/plain; version=0.0.4")
        assert "s3cret" not in answer.body.decode()


def test_percentiles_are_over_the_window_and_are_values_that_occurred() -> None:
    metrics = RequestMetrics(window_s=10)
    assert metrics.ttft_quantiles(0, (0.5,)) is None
    for second in range(20):
        metrics.finished(CHAT, 200, Tally(started=0.0, ttft_s=second + 1.0), now=float(second))

    assert metrics.ttft_quantiles(19, (0.5, 0.95)) == [15.0, 20.0]
    assert metrics.ttft_quantiles(60, (0.5, 0.95)) is None


def test_the_pace_of_a_sequence_leaves_its_first_batch_out() -> None:
    assert Pace(first_at=10.0, last_at=10.0).token_s is None
    assert Pace(first_at=10.0, last_at=13.0, later_tokens=6).token_s == 0.5


async def test_the_sequences_of_one_request_have_a_pace_each() -> None:
    async with live_app(Script(step_s=0.002)) as app:
        await app.chat(n=3)
        text = await page(app)
    assert value(text, "tqd_time_per_output_token_seconds_count") == 3
    assert value(text, "tqd_time_to_first_token_seconds_count") == 1


async def test_the_status_document_gets_percentiles_of_the_first_token() -> None:
    async with live_app() as app:
        assert app.serving.snapshot().ttft_p50_s is None
        await app.chat()
        now: Snapshot = app.serving.snapshot()
    assert now.ttft_p50_s is not None
    assert now.ttft_p50_s == now.ttft_p95_s
