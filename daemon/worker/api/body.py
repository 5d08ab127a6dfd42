"""JSON in and out: request bodies become objects or a 400, documents become responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from daemon.worker.api.errors import ApiError, invalid


async def read_object(request: web.Request) -> dict[str, object]:
    """Return the JSON object in the body of *request*; its content type does not matter.

    Raises:
        ApiError: the body is not a JSON object.
    """
    try:
        raw = await request.read()
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise invalid(f"The body could not be read: {type(error).__name__}.") from None
    try:
        document = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not valid JSON: {_reason(error)}.") from None
    if not isinstance(document, dict):
        raise invalid('The body must be a JSON object, such as {"model": ..., ...}.')
    return document


def reply(
    document: Mapping[str, object], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return *document* as a JSON response."""
    return web.Response(
        body=encode(document).encode("utf-8", "backslashreplace"),
        status=status,
        content_type="application/json",
        charset="utf-8",
        headers=headers,
    )


def reply_error(error: ApiError) -> web.Response:
    """Return *error* as a JSON response with its headers."""
    return reply(error.body(), status=error.status, headers=error.headers)


def encode(document: Mapping[str, object]) -> str:
    """Return *document* as compact JSON on one line."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return str(error)
