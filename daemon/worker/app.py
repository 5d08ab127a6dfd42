"""The HTTP application of a worker: its routes, and what holds for every one of them.

One middleware counts, logs and turns every failure into a JSON error object; another decides who may call.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from uuid import uuid4

import structlog
from aiohttp import hdrs, web

from daemon.log import get_logger
from daemon.worker.access import (
    cors_headers,
    host_allowed,
    key_accepted,
    origin_allowed,
    preflight_headers,
)
from daemon.worker.api import errors, ops
from daemon.worker.api.answers import TALLY, Job, Tally, answer
from daemon.worker.api.body import read_object, reply_error
from daemon.worker.api.chat import chat_job
from daemon.worker.api.completions import completion_job
from daemon.worker.api.errors import ApiError
from daemon.worker.api.generation import Run
from daemon.worker.api.ops import SERVING
from daemon.worker.api.sse import StreamTimes
from daemon.worker.serving import Model, Serving

MAX_BODY_BYTES = 64 * 2**20  # agents send conversations of megabytes; aiohttp's own limit is one
CLIENT_GONE = 499  # nginx's number for a client that left; only the log ever sees it

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPEN_PATHS = frozenset({"/", "/health", "/healthz", "/livez", "/readyz"})

TIMES = web.AppKey("times", StreamTimes)
REQUEST_ID = web.RequestKey("request_id", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MakeJob = Callable[[Mapping[str, object], Serving, Model], Awaitable[Job]]


def build_app(serving: Serving, times: StreamTimes | None = None) -> web.Application:
    """Return the application that serves *serving*; it answers from the first moment, ready or not."""
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[_answer_every_failure, _admit]
    )
    app[SERVING] = serving
    app[TIMES] = times or StreamTimes()
    app.on_response_prepare.append(_add_headers)
    for prefix in ("/v1", ""):
        app.router.add_get(f"{prefix}/models", ops.models)
        app.router.add_get(f"{prefix}/models/{{id:.+}}", ops.model)
        app.router.add_post(f"{prefix}/chat/completions", _generating(chat_job))
        app.router.add_post(f"{prefix}/completions", _generating(completion_job))
    for path in ("/", "/health", "/healthz"):
        app.router.add_get(path, ops.health)
    app.router.add_get("/livez", ops.livez)
    app.router.add_get("/readyz", ops.readyz)
    app.router.add_get("/props", ops.props)
    app.router.add_get("/v1/cache/stats", ops.cache_stats)
    app.router.add_get("/metrics", ops.metrics)
    return app


def _generating(make_job: MakeJob) -> Handler:
    """Return the route that runs what *make_job* makes of a body."""

    async def generate(request: web.Request) -> web.StreamResponse:
        serving = request.app[SERVING]
        tally = request[TALLY]
        tally.generates = True
        serving.counters.requests += 1
        with serving.request(request[REQUEST_ID], tally) as model:
            job = await make_job(await read_object(request), serving, model)
            run = Run(model.loaded.engine, job.requests, serving.interrupted)
            return await answer(request, run, job, request.app[TIMES])

    return generate


@web.middleware
async def _answer_every_failure(request: web.Request, handler: Handler) -> web.StreamResponse:
    tally = request[TALLY] = Tally()
    offered = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = offered if _REQUEST_ID.fullmatch(offered) else f"req_{uuid4().hex}"
    status = CLIENT_GONE
    with structlog.contextvars.bound_contextvars(request_id=request[REQUEST_ID]):
        try:
            response = await _respond(request, handler)
            status = response.status if tally.failure is None else tally.failure.status
            return response
        finally:
            endpoint = _endpoint(request)
            _count(request.app[SERVING], endpoint, tally, status)
            _log(request, endpoint, tally, status)


async def _respond(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        failure = _from_http(request, error)
    except ConnectionError:
        raise  # the client is gone in the middle of a stream: there is nobody to answer
    except Exception:  # noqa: BLE001 - whatever it is, the client gets an error object and we go on
        get_logger().exception("request.failed", path=request.path)
        failure = errors.internal()
    request[TALLY].failure = failure
    return reply_error(failure)


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """Return aiohttp's own refusals as error objects."""
    if error.status == 404:
        hint = " The base URL ends with /v1 twice." if request.path.startswith("/v1/v1/") else ""
        message = f"Unknown request URL: {request.method} {request.path}.{hint}"
        return ApiError(404, message, code="unknown_url")
    if error.status == 405:
        allow = error.headers.get(hdrs.ALLOW, "")
        message = f"{request.method} is not possible for {request.path}; use {allow}."
        return ApiError(405, message, code="method_not_allowed", headers={hdrs.ALLOW: allow})
    if error.status == 413:
        message = f"The body is larger than {MAX_BODY_BYTES} bytes."
        return ApiError(413, message, code="request_too_large")
    return ApiError(error.status, f"{error.reason}.")


@web.middleware
async def _admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign names and pages, answer preflights, ask for the key."""
    serving = request.app[SERVING]
    host = request.headers.get(hdrs.HOST)
    if not host_allowed(host, serving.server.allowed_hosts):
        raise ApiError(
            403,
            f"The Host header '{host}' is not allowed; add it to allowed_hosts of this server.",
            code="host_not_allowed",
        )
    if request.method == hdrs.METH_OPTIONS:
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
        private = request.headers.get("Access-Control-Request-Private-Network") == "true"
        return web.Response(status=204, headers=preflight_headers(asked, private_network=private))
    origin = request.headers.get(hdrs.ORIGIN)
    writes = request.method not in (hdrs.METH_GET, hdrs.METH_HEAD)
    if origin and writes and not origin_allowed(origin, host, serving.server.cors_origins):
        raise ApiError(
            403,
            f"Pages of '{origin}' may not call this server; add it to cors_origins.",
            code="origin_not_allowed",
        )
    if request.path not in _OPEN_PATHS and not key_accepted(
        request.headers.get(hdrs.AUTHORIZATION), request.headers.get("x-api-key"), serving.api_key
    ):
        raise errors.unauthorized()
    return await handler(request)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add what every response carries, errors and streams too, just before its headers leave."""
    if request.app[SERVING].ending:  # a kept connection would come back to a worker that is gone
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"
    response.headers[hdrs.SERVER] = "tqd"
    response.headers["x-request-id"] = request.get(REQUEST_ID, "")
    response.headers.update(
        cors_headers(
            request.headers.get(hdrs.ORIGIN),
            request.headers.get(hdrs.HOST),
            request.app[SERVING].server.cors_origins,
        )
    )


def _endpoint(request: web.Request) -> str:
    """Return the route as registered: there are as many as the application has, whatever is asked for."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


def _count(serving: Serving, endpoint: str, tally: Tally, status: int) -> None:
    serving.metrics.finished(endpoint, status, tally, time.monotonic())
    if not tally.generates:
        return
    if status == CLIENT_GONE:
        serving.counters.cancelled += 1
    elif status in (429, 503):
        serving.counters.rejected += 1
    elif status >= 500:
        serving.counters.errors += 1


def _log(request: web.Request, endpoint: str, tally: Tally, status: int) -> None:
    """Write the one line of this request: numbers only, never text. Polled routes that succeed stay quiet."""
    fields: dict[str, object] = {
        "method": request.method,
        "route": endpoint,
        "status": status,
        "duration_ms": round((time.monotonic() - tally.started) * 1000, 1),
    }
    if tally.failure is not None:
        fields["code"] = tally.failure.code
    if tally.generates:
        fields |= {
            "stream": tally.stream,
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "ttft_ms": None if tally.ttft_s is None else round(tally.ttft_s * 1000, 1),
        }
    loud = tally.generates or tally.failure is not None
    (get_logger().info if loud else get_logger().debug)("request.finished", **fields)
