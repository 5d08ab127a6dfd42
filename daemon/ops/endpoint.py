"""The ops endpoint: read-only HTTP for dashboards, probes and scripts, answered from memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from daemon.config.address import Endpoint, is_loopback
from daemon.metrics.exposition import Page, exposition
from daemon.ops import dashboard
from daemon.ops.applied import AppliedConfig
from daemon.ops.document import OpenRequests, ServerStatus
from daemon.ops.events import EventLog
from daemon.ops.history import HistoryDocument, Transition
from daemon.ops.stream import EventStream
from daemon.ops.written import Written

LONGEST_WAIT_S = 300.0
WAIT_S = 30.0
JSON = "application/json"


class Source(Protocol):
    """Where the answers come from."""

    def status(self) -> Written:
        """Return the status document."""

    def server(self, name: str) -> ServerStatus | None:
        """Return the part about one server."""

    def requests(self, name: str) -> OpenRequests | None:
        """Return the open requests of one server."""

    def unready(self, names: list[str] | None) -> dict[str, str]:
        """Return why servers are not ready, by name."""

    def config(self) -> AppliedConfig:
        """Return the configuration in force."""

    def history(self) -> HistoryDocument:
        """Return the last changes of every server, and the last reloads."""

    def server_history(self, name: str) -> Sequence[Transition]:
        """Return the last changes of server *name*."""

    def metrics(self, page: Page) -> Iterator[None]:
        """Fill the metrics page, a little at each step."""


class _BadQueryError(Exception):
    """A query parameter that means nothing."""


class StatusEndpoint:
    """Serves *source* and *events* on *endpoint* until closed."""

    def __init__(self, endpoint: Endpoint, source: Source, events: EventLog) -> None:
        self._endpoint = endpoint
        self._source = source
        self._events = events
        self._stream = EventStream(events)
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Start to listen; raises OSError when the address cannot be had."""
        runner = web.AppRunner(
            self.application(),
            access_log=None,
            shutdown_timeout=1.0,
            handler_cancellation=True,  # a client that has gone waits for nothing
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._endpoint.host, self._endpoint.port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def application(self) -> web.Application:
        """Return the routes; apart from `open` so that tests need no socket."""
        app = web.Application(middlewares=[self._check_host])
        app.add_routes(
            [
                web.get("/", self._dashboard),
                web.get("/v1/status", self._status),
                web.get("/v1/servers/{name}", self._server),
                web.get("/v1/servers/{name}/history", self._server_history),
                web.get("/v1/servers/{name}/requests", self._requests),
                web.get("/v1/history", self._history),
                web.get("/v1/config", self._config),
                web.get("/v1/events", self._event_stream),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    @web.middleware
    async def _check_host(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse names that are not this machine's: a web page may have pointed its own name here."""
        try:
            host = request.url.host or ""
        except ValueError:
            host = request.host
        if not (is_loopback(host) or host == self._endpoint.host):
            return _error(403, f"host {host!r} is not served here", "use localhost")
        try:
            return await handler(request)
        except _BadQueryError as error:
            return _error(400, str(error), "such as /v1/status?wait=12&timeout=30, in seconds")
        except web.HTTPNotFound:
            return _error(404, f"there is no {request.path}", "see /v1/status")
        except web.HTTPMethodNotAllowed as error:
            response = _error(405, "this endpoint only reads", "use `tqd` to change something")
            response.headers["Allow"] = error.headers["Allow"]
            return response

    async def _dashboard(self, request: web.Request) -> web.Response:
        return web.Response(body=dashboard.page(), headers=dashboard.headers())

    async def _status(self, request: web.Request) -> web.Response:
        if "wait" in request.query:
            await self._wait(_number(request, "wait", 0.0), _number(request, "timeout", WAIT_S))
        written = self._source.status()
        headers = {"ETag": written.etag, "Cache-Control": "no-cache"}
        if written.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=written.body, content_type=JSON, charset="utf-8", headers=headers)

    async def _wait(self, seq: float, timeout_s: float) -> None:
        """Wait for an event after number *seq*; one that is still to come is of an earlier daemon."""
        if seq > self._events.seq:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, LONGEST_WAIT_S)):
                await self._events.wait(int(seq))

    async def _server(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        server = self._source.server(name)
        return _unknown(name) if server is None else web.json_response(server)

    async def _server_history(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self._source.server(name) is None:
            return _unknown(name)
        return web.json_response({"history": self._source.server_history(name)})

    async def _requests(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        found = self._source.requests(name)
        return _unknown(name) if found is None else web.json_response(found)

    async def _history(self, request: web.Request) -> web.Response:
        return web.json_response(self._source.history())

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response(self._source.config())

    async def _event_stream(self, request: web.Request) -> web.StreamResponse:
        if self._stream.full:
            return _error(503, "too many clients follow the events", "close some of them")
        return await self._stream.serve(request)

    async def _livez(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        asked = request.query.get("servers")
        names = None if asked is None else [name for name in asked.split(",") if name]
        unready = self._source.unready(names)
        body = {"status": "unready" if unready else "ok", "unready": unready}
        return web.json_response(body, status=503 if unready else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        page, accept = Page(), request.headers.get(hdrs.ACCEPT, "")
        parts = []
        for _ in self._source.metrics(page):
            await asyncio.sleep(0)  # with many servers it takes a while, and others ask meanwhile
        for part in page.parts(accept):
            parts.append(part)
            await asyncio.sleep(0)
        written = exposition(accept, parts)
        return web.Response(body=written.body, headers={hdrs.CONTENT_TYPE: written.content_type})


def _number(request: web.Request, name: str, default: float) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise _BadQueryError(f"{name} must be a number that is not negative")
    return value


def _unknown(name: str) -> web.Response:
    return _error(404, f"no server is called {name!r}", "see /v1/status")


def _error(status: int, message: str, hint: str) -> web.Response:
    return web.json_response({"error": {"message": message, "hint": hint}}, status=status)
