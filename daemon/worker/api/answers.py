"""Runs the sequences of a request and answers with one document or a stream of them.

What the documents look like is the dialect's; when they are sent, and what happens on a failure, is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from daemon.log import get_logger
from daemon.worker.api import errors
from daemon.worker.api.body import reply
from daemon.worker.api.errors import ApiError
from daemon.worker.api.generation import Run
from daemon.worker.api.sse import Events, StreamTimes, event_stream
from daemon.worker.requests import EngineFailedError, FinishReason, GenerationRequest
from daemon.worker.text import Piece, Shown, TextStream

Document = Mapping[str, object]


@dataclass(slots=True)
class Pace:
    """When the tokens of one sequence came, on the monotonic clock."""

    first_at: float
    last_at: float
    later_tokens: int = 0
    """Those that came after the first batch."""

    @property
    def token_s(self) -> float | None:
        """Mean time of a later token; None before there is one."""
        if not self.later_tokens:
            return None
        return (self.last_at - self.first_at) / self.later_tokens


@dataclass(slots=True)
class Tally:
    """What the log and the metrics say of a request; *started* is on the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    generates: bool = False
    stream: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    paces: dict[int, Pace] = field(default_factory=dict)
    failure: ApiError | None = None

    def count(self, index: int, tokens: int) -> None:
        """Count *tokens* generated ones of sequence *index*; the first stop the clock of the TTFT."""
        if not tokens:
            return
        now = time.monotonic()
        self.completion_tokens += tokens
        if self.ttft_s is None:
            self.ttft_s = now - self.started
        pace = self.paces.get(index)
        if pace is None:
            self.paces[index] = Pace(now, now)
        else:
            pace.last_at = now
            pace.later_tokens += tokens


TALLY = web.RequestKey("tally", Tally)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request; a prompt counts once for all its choices."""

    prompt_tokens: int
    completion_tokens: int

    def document(self) -> Document:
        """Return the counts as OpenAI clients expect them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished sequence."""

    index: int
    text: str
    tokens: tuple[Shown, ...]
    finish: FinishReason


class Dialect(Protocol):
    """The documents of one endpoint."""

    def opening(self, index: int) -> Document | None:
        """Return what comes before the first text of choice *index* in a stream."""
        ...

    def delta(self, index: int, piece: Piece) -> Document:
        """Return what carries *piece* in a stream."""
        ...

    def closing(self, index: int, finish: FinishReason) -> Document:
        """Return the one event with the finish reason of choice *index*."""
        ...

    def usage(self, usage: Usage) -> Document:
        """Return the event with the token counts."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Document:
        """Return the answer of a request that does not stream."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request: its sequences, the text stream of each, and how to answer."""

    requests: Sequence[GenerationRequest]
    texts: Sequence[TextStream]
    prompt_tokens: int
    dialect: Dialect
    stream: bool
    include_usage: bool

    @property
    def spent(self) -> Usage:
        """The token counts so far."""
        return Usage(self.prompt_tokens, sum(text.tokens for text in self.texts))


async def answer(
    request: web.Request, run: Run, job: Job, times: StreamTimes
) -> web.StreamResponse:
    """Answer *request* with what *run* generates."""
    tally = request[TALLY]
    tally.stream = job.stream
    tally.prompt_tokens = job.prompt_tokens
    async with run:
        if not job.stream:
            return await _collect(run, job, tally)
        async with event_stream(request, times) as events:
            await _stream(events, run, job, tally)
            return events.response


async def _receive(run: Run, job: Job, tally: Tally) -> tuple[int, Piece]:
    """Return the next piece of any choice; a finished one leaves the run."""
    index, batch = await run.receive()
    before = job.texts[index].tokens
    piece = job.texts[index].feed(batch)
    tally.count(index, job.texts[index].tokens - before)
    if piece.finish is not None:
        run.end(index)
    return index, piece


async def _collect(run: Run, job: Job, tally: Tally) -> web.Response:
    texts: list[list[str]] = [[] for _ in job.texts]
    tokens: list[list[Shown]] = [[] for _ in job.texts]
    finishes: dict[int, FinishReason] = {}
    try:
        while run.running:
            index, piece = await _receive(run, job, tally)
            texts[index].append(piece.text)
            tokens[index].extend(piece.tokens)
            if piece.finish is not None:
                finishes[index] = piece.finish
    except EngineFailedError:
        raise errors.engine_failed() from None
    choices = [
        Choice(index, "".join(texts[index]), tuple(tokens[index]), finish)
        for index, finish in sorted(finishes.items())
    ]
    return reply(job.dialect.whole(choices, job.spent))


async def _stream(events: Events, run: Run, job: Job, tally: Tally) -> None:
    """Send everything; a failure becomes an error event, without a finish reason and without an end mark."""
    try:
        await _send_pieces(events, run, job, tally)
    except ConnectionError:
        raise
    except ApiError as error:
        tally.failure = error
    except EngineFailedError:
        tally.failure = errors.engine_failed()
    except Exception:  # noqa: BLE001 - the headers are gone: an error event is the only answer left
        get_logger().exception("request.failed")
        tally.failure = errors.internal()
    if tally.failure is not None:
        await events.send(tally.failure.body())


async def _send_pieces(events: Events, run: Run, job: Job, tally: Tally) -> None:
    opened: set[int] = set()
    while run.running:
        index, piece = await _receive(run, job, tally)
        if index not in opened:
            opened.add(index)
            opening = job.dialect.opening(index)
            if opening is not None:
                await events.send(opening)
        if piece.text or piece.tokens:
            await events.send(job.dialect.delta(index, piece))
        if piece.finish is not None:
            await events.send(job.dialect.closing(index, piece.finish))
    if job.include_usage:
        await events.send(job.dialect.usage(job.spent))
    await events.done()
