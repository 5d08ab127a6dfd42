"""The errors of the HTTP API: what went wrong, as a status and one JSON error object.

Clients read `error.message`, and some classify by its text, so the wording of the context overflow is part of the API.
"""

from __future__ import annotations

from collections.abc import Mapping

from daemon.units import format_size

MAX_RETRY_AFTER_S = 30  # SDKs sleep as long as they are told to; longer would only look like a hang


class ApiError(Exception):
    """A refused or failed request: everything its JSON error object and its headers say."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self) -> dict[str, object]:
        """Return the error object as OpenAI clients expect it."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | self.extra}


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """A value that cannot be used; *param* is its path in the body, such as ``messages[2].role``."""
    return ApiError(400, message, param=param, code=code)


def unavailable_feature(message: str, param: str) -> ApiError:
    """A documented field of the API that this server does not implement."""
    return ApiError(400, message, param=param, code="unsupported_value")


def context_overflow(n_ctx: int, prompt_tokens: int, param: str) -> ApiError:
    """A prompt that leaves no room for one more token."""
    return ApiError(
        400,
        f"This model's maximum context length is {n_ctx} tokens. "
        f"However, your messages resulted in {prompt_tokens} tokens.",
        param=param,
        code="context_length_exceeded",
        extra={"n_prompt_tokens": prompt_tokens, "n_ctx": n_ctx},
    )


def unauthorized() -> ApiError:
    """No key, or a wrong one."""
    return ApiError(
        401,
        "This server needs an API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        param=None,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(name: str, served: tuple[str, ...]) -> ApiError:
    """A model name that this server does not answer to."""
    choices = ", ".join(f"'{choice}'" for choice in served)
    return ApiError(
        404,
        f"The model '{name}' does not exist here; this server answers to {choices}.",
        param="model",
        code="model_not_found",
    )


def queue_full(retry_after_s: int, *, for_memory: bool = False) -> ApiError:
    """The waiting line has no place left; *for_memory*: what it waits for is memory that running requests hold."""
    what = "memory that running requests hold" if for_memory else "a place"
    return ApiError(
        429,
        f"Too many requests are waiting for {what}; try again soon.",
        kind="rate_limit_error",
        code="memory_full" if for_memory else "queue_full",
        headers=_retry_after(retry_after_s),
    )


def too_large(tokens: int, needed_bytes: int, limit_bytes: int) -> ApiError:
    """A request that would not fit into the server's memory even alone."""
    return ApiError(
        400,
        f"This request may grow to {tokens} tokens, whose cache takes {format_size(needed_bytes)}; this server has "
        f"{format_size(limit_bytes)} for all requests. Send a shorter prompt or a smaller max_tokens.",
        param="max_tokens",
        code="insufficient_memory",
    )


def not_ready(
    code: str, message: str, retry_after_s: int, extra: Mapping[str, object] | None = None
) -> ApiError:
    """The worker cannot take requests now: it loads, drains, or its engine is dead."""
    headers = _retry_after(retry_after_s)
    return ApiError(503, message, kind="server_error", code=code, headers=headers, extra=extra)


def draining() -> ApiError:
    """The worker finishes what runs and takes nothing new."""
    return not_ready("server_draining", "This server is shutting down; try again soon.", 5)


def engine_gone() -> ApiError:
    """The engine failed before this request; the worker is about to be replaced."""
    return not_ready("worker_unavailable", "The engine has failed; the server is restarting.", 5)


def engine_failed() -> ApiError:
    """The engine stopped in the middle of this request; the worker is about to be replaced."""
    return ApiError(
        500,
        "The engine failed while generating; the server is restarting.",
        kind="server_error",
        code="engine_failed",
    )


def internal() -> ApiError:
    """A defect of ours; the cause is in the log, never in the answer."""
    return ApiError(
        500,
        "The server failed to handle this request; its log has the cause.",
        kind="server_error",
        code="internal_error",
    )


def _retry_after(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(min(max(seconds, 1), MAX_RETRY_AFTER_S))}
