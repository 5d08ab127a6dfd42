from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from daemon.config.address import Endpoint
from daemon.metrics.exposition import Page
from daemon.ops.document import Document, ServerStatus
from daemon.ops.endpoint import StatusEndpoint
from daemon.ops.metrics import metrics
from daemon.ops.status import View, document, server_status, unready


class FakeSource:
    def __init__(self, view: View) -> None:
        self._view = view

    def status(self) -> Document:
        return document(self._view)

    def server(self, name: str) -> ServerStatus | None:
        server = self._view.fleet.servers.get(name)
        return None if server is None else server_status(self._view, server)

    def metrics(self) -> Page:
        return metrics(self._view)

    def unready(self, names: list[str] | None) -> dict[str, str]:
        return unready(self._view.fleet, names)


def ask(
    view: View, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, Any, dict[str, str]]:
    async def work() -> tuple[int, Any, dict[str, str]]:
        endpoint = StatusEndpoint(Endpoint("127.0.0.1", 8700), FakeSource(view))
        async with TestClient(TestServer(endpoint.application())) as client:
            headers = {} if host is None else {"Host": host}
            async with client.request(method, path, headers=headers) as answer:
                return answer.status, await answer.json(), dict(answer.headers)

    return asyncio.run(work())


def test_status_is_the_document_and_200_even_when_servers_are_down(view: View) -> None:
    assert ask(view, "/v1/status")[:2] == (200, document(view))


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
    assert ask(view, "/livez", host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8700", "127.0.0.1.evil.example"])
def test_a_foreign_host_header_is_refused(view: View, host: str) -> None:
    assert ask(view, "/v1/status", host=host)[0] == 403


def test_every_failure_is_a_json_object(view: View) -> None:
    status, body, _ = ask(view, "/v2/what")
    assert (status, body["error"]["message"]) == (404, "there is no /v2/what")
    status, body, headers = ask(view, "/v1/status", method="POST")
    assert (status, headers["Allow"]) == (405, "GET,HEAD")
