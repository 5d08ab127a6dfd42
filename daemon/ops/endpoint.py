"""The ops endpoint: read-only HTTP for dashboards, probes and scripts, answered from memory."""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from daemon.config.address import Endpoint, is_loopback
from daemon.metrics.exposition import Page
from daemon.ops.document import Document, ServerStatus


class Source(Protocol):
    """Where the answers come from."""

    def status(self) -> Document:
        """Return the status document."""

    def server(self, name: str) -> ServerStatus | None:
        """Return the part about one server."""

    def unready(self, names: list[str] | None) -> dict[str, str]:
        """Return why servers are not ready, by name."""

    def metrics(self) -> Page:
        """Return the metrics page."""


class StatusEndpoint:
    """Serves *source* on *endpoint* until closed."""

    def __init__(self, endpoint: Endpoint, source: Source) -> None:
        self._endpoint = endpoint
        self._source = source
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Start to listen; raises OSError when the address cannot be had."""
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=1.0)
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
                web.get("/v1/status", self._status),
                web.get("/v1/servers/{name}", self._server),
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
        except web.HTTPNotFound:
            return _error(404, f"there is no {request.path}", "see /v1/status")
        except web.HTTPMethodNotAllowed as error:
            response = _error(405, "this endpoint only reads", "use `tqd` to change something")
            response.headers["Allow"] = error.headers["Allow"]
            return response

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._source.status())

    async def _server(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        server = self._source.server(name)
        if server is None:
            return _error(404, f"no server is called {name!r}", "see /v1/status")
        return web.json_response(server)

    async def _livez(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        asked = request.query.get("servers")
        names = None if asked is None else [name for name in asked.split(",") if name]
        unready = self._source.unready(names)
        body = {"status": "unready" if unready else "ok", "unready": unready}
        return web.json_response(body, status=503 if unready else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        page, accept = self._source.metrics(), request.headers.get(hdrs.ACCEPT, "")
        written = await asyncio.to_thread(page.render, accept)  # with many servers it takes a while
        return web.Response(body=written.body, headers={hdrs.CONTENT_TYPE: written.content_type})


def _error(status: int, message: str, hint: str) -> web.Response:
    return web.json_response({"error": {"message": message, "hint": hint}}, status=status)
