from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from daemon.config.address import Endpoint
from daemon.metrics.exposition import Page
from daemon.ops.applied import AppliedConfig
from daemon.ops.document import OpenRequests, ServerStatus
from daemon.ops.endpoint import StatusEndpoint
from daemon.ops.events import EventLog
from daemon.ops.history import HistoryDocument, Transition
from daemon.ops.metrics import metrics
from daemon.ops.server_status import open_requests, server_status
from daemon.ops.status import document, unready
from daemon.ops.view import View
from daemon.ops.written import Writer, Written
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import State

Answer = tuple[int, Any, Mapping[str, str]]
TRANSITION = cast("Transition", {"at": "now", "from": "loading", "to": "ready"})


class FakeSource:
    """Answers from *view*, with the newest event of *log*."""

    def __init__(self, view: View, log: EventLog) -> None:
        self._view = view
        self._log = log

    def config(self) -> AppliedConfig:
        return cast("AppliedConfig", {"generation": 3})

    def history(self) -> HistoryDocument:
        return {"servers": {"chat": [TRANSITION]}, "reloads": []}

    def server_history(self, name: str) -> Sequence[Transition]:
        return [TRANSITION]

    def status(self) -> Written:
        return Writer().write(replace(self._view, seq=self._log.seq))

    def server(self, name: str) -> ServerStatus | None:
        server = self._view.fleet.servers.get(name)
        return None if server is None else server_status(self._view, server)

    def requests(self, name: str) -> OpenRequests | None:
        server = self._view.fleet.servers.get(name)
        return None if server is None else open_requests(self._view, server)

    def metrics(self, page: Page) -> Iterator[None]:
        return metrics(self._view, page)

    def unready(self, names: list[str] | None) -> dict[str, str]:
        return unready(self._view.fleet, names)


Ask = Callable[[TestClient[web.Request, web.Application], EventLog], Awaitable[Answer]]


def visit(view: View, work: Ask) -> Answer:
    """Do *work* with a client of an endpoint whose log has three events."""

    async def session() -> Answer:
        log = EventLog(boot="0badcafe")
        for name in ("a", "b", "c"):
            log.publish("server.added", "now", {"server": name})
        endpoint = StatusEndpoint(Endpoint("127.0.0.1", 8700), FakeSource(view, log), log)
        server = TestServer(endpoint.application())
        async with TestClient(server) as client:
            return await work(client, log)

    return asyncio.run(session())


def ask(view: View, path: str, method: str = "GET", **headers: str) -> Answer:
    async def work(client: TestClient[web.Request, web.Application], log: EventLog) -> Answer:
        async with client.request(method, path, headers=headers) as answer:
            body = await answer.read()
            return answer.status, json.loads(body) if body else None, answer.headers.copy()

    return visit(view, work)


def test_status_is_the_document_and_200_even_when_servers_are_down(view: View) -> None:
    assert ask(view, "/v1/status")[:2] == (200, document(replace(view, seq=3)))


def test_one_server_has_a_page_of_its_own(view: View) -> None:
    status, body, _ = ask(view, "/v1/servers/code")
    assert (status, body["state"]) == (200, "failed")
    assert ask(view, "/v1/servers/nobody")[0] == 404


@pytest.mark.parametrize(
    ("path", "status", "unready"),
    [
        ("/livez", 200, None),
        ("/readyz", 503, {"code": "failed: why"}),
        ("/readyz?servers=chat", 200, {}),
        ("/readyz?servers=chat,idle", 503, {"idle": "stopped"}),
        ("/readyz?servers=nobody", 503, {"nobody": "no server of that name"}),
    ],
)
def test_probes_give_a_verdict_with_reasons(
    view: View, path: str, status: int, unready: dict[str, str] | None
) -> None:
    found, body, _ = ask(view, path)
    assert (found, body.get("unready")) == (status, unready)


@pytest.mark.parametrize("host", ["localhost", "localhost:8700", "127.0.0.1:8700", "[::1]:8700"])
def test_the_names_of_this_machine_are_served(view: View, host: str) -> None:
    assert ask(view, "/livez", Host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8700", "127.0.0.1.evil.example"])
def test_a_foreign_host_header_is_refused(view: View, host: str) -> None:
    assert ask(view, "/v1/status", Host=host)[0] == 403


def test_every_failure_is_a_json_object(view: View) -> None:
    status, body, _ = ask(view, "/v2/what")
    assert (status, body["error"]["message"]) == (404, "there is no /v2/what")
    status, body, headers = ask(view, "/v1/status", method="POST")
    assert (status, headers["Allow"]) == (405, "GET,HEAD")


def test_a_client_that_has_the_document_is_told_so_until_something_but_ages_has_changed(
    view: View,
) -> None:
    _, _, headers = ask(view, "/v1/status")
    assert headers["ETag"].startswith('W/"0-3-')
    known = {"If-None-Match": headers["ETag"]}
    later = replace(view, now=view.now + 60.0)
    assert ask(later, "/v1/status", **known)[:2] == (304, None)

    report = view.reports["chat"]
    assert report.snapshot is not None
    busier = replace(report, snapshot=report.snapshot.model_copy(update={"decode_tps": 9.0}))
    assert ask(replace(view, reports={"chat": busier}), "/v1/status", **known)[0] == 200


def test_a_long_poll_returns_with_the_event_that_it_waited_for(view: View) -> None:
    async def work(client: TestClient[web.Request, web.Application], log: EventLog) -> Answer:
        waiting = asyncio.create_task(client.get("/v1/status?wait=3&timeout=60"))
        while not log.waiting:  # noqa: ASYNC110 - nobody else needs an event for this
            await asyncio.sleep(0)
        assert not waiting.done()
        log.publish("server.removed", "now", {"server": "a"})
        async with await waiting as answer:
            return answer.status, await answer.json(), answer.headers.copy()

    status, body, _ = visit(view, work)
    assert (status, body["seq"]) == (200, 4)


@pytest.mark.parametrize("query", ["wait=2&timeout=60", "wait=3&timeout=0", "wait=99&timeout=60"])
def test_a_long_poll_answers_at_once_with_news_with_no_patience_and_for_another_daemon(
    view: View, query: str
) -> None:
    assert ask(view, f"/v1/status?{query}")[1]["seq"] == 3


@pytest.mark.parametrize("query", ["wait=soon", "wait=-1", "wait=1&timeout=inf", "wait=nan"])
def test_a_wait_that_is_no_number_is_refused(view: View, query: str) -> None:
    status, body, _ = ask(view, f"/v1/status?{query}")
    assert (status, body["error"]["hint"]) == (
        400,
        "such as /v1/status?wait=12&timeout=30, in seconds",
    )


def test_open_requests_are_told_by_id_age_and_tokens_while_there_is_a_worker(view: View) -> None:
    assert ask(view, "/v1/servers/chat/requests")[1] == {
        "sampled_at": "2027-01-15T08:16:39.000Z",
        "requests": [
            {"id": "req_1", "age_s": 2.5, "stream": True, "prompt_tokens": 9, "completion_tokens": 4}
        ],
    }  # fmt: skip
    nothing = {"sampled_at": None, "requests": []}
    chat = view.fleet.servers["chat"]
    gone = Fleet("b", {"chat": replace(chat, worker=None, state=State.BACKOFF)})
    assert ask(replace(view, fleet=gone), "/v1/servers/chat/requests")[1] == nothing
    assert ask(view, "/v1/servers/idle/requests")[1] == nothing
    assert ask(view, "/v1/servers/nobody/requests")[0] == 404


def test_history_and_the_applied_configuration_have_pages(view: View) -> None:
    assert ask(view, "/v1/history")[1]["servers"] == {"chat": [TRANSITION]}
    assert ask(view, "/v1/servers/chat/history")[1] == {"history": [TRANSITION]}
    assert ask(view, "/v1/servers/nobody/history")[0] == 404
    assert ask(view, "/v1/config")[1] == {"generation": 3}


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0"])
def test_a_scrape_gets_the_whole_page_in_the_format_that_it_accepts(
    view: View, accept: str
) -> None:
    async def work(client: TestClient[web.Request, web.Application], log: EventLog) -> Answer:
        async with client.get("/metrics", headers={"Accept": accept}) as answer:
            return answer.status, await answer.read(), answer.headers.copy()

    status, body, headers = visit(view, work)
    page = Page()
    for _ in metrics(view, page):
        pass
    expected = page.render(accept)
    assert (status, body, headers["Content-Type"]) == (200, expected.body, expected.content_type)


def test_the_dashboard_may_run_its_own_script_and_nothing_else(view: View) -> None:
    async def work(client: TestClient[web.Request, web.Application], log: EventLog) -> Answer:
        async with client.get("/") as answer:
            return answer.status, await answer.text(), answer.headers.copy()

    status, html, headers = visit(view, work)
    policy = dict(it.split(" ", 1) for it in headers["Content-Security-Policy"].split("; "))
    assert status == 200
    assert policy["default-src"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    script = html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in headers["Content-Security-Policy"]
