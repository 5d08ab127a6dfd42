"""The sequences of one request, from submission to their end, whatever that end is.

A `Run` owns them: leaving its block aborts what still runs, so a disconnect, a failure or a full queue
half-way leaves nothing behind in the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from daemon.worker.api import errors
from daemon.worker.requests import (
    Engine,
    EngineFailedError,
    Generation,
    GenerationRequest,
    QueueFullError,
    TokenEvent,
    TooLargeError,
)

Batch = Sequence[TokenEvent]


class Run:
    """Several sequences of one engine, received in the order in which their tokens come.

    *interrupted* is done when the worker can wait no longer for running requests.

    Raises:
        ApiError: the engine takes no more sequences; none is left running.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        interrupted: asyncio.Future[None],
    ) -> None:
        self._interrupted = interrupted
        self._running: dict[int, Generation] = {}
        self._iterators: dict[int, AsyncIterator[Batch]] = {}
        self._waits: dict[asyncio.Task[Batch], int] = {}
        self._arrived: deque[tuple[int, Batch]] = deque()
        try:
            for index, request in enumerate(requests):
                generation = engine.submit(request)
                self._running[index] = generation
                self._iterators[index] = aiter(generation)
        except QueueFullError as error:
            self._abort()
            raise errors.queue_full(error.retry_after_s, for_memory=error.for_memory) from None
        except TooLargeError as error:
            self._abort()
            raise errors.too_large(error.tokens, error.needed_bytes, error.limit_bytes) from None
        except EngineFailedError:
            self._abort()
            raise errors.engine_gone() from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abort()
        waits = tuple(self._waits)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    @property
    def running(self) -> bool:
        """Whether a sequence is left to receive from."""
        return bool(self._running)

    async def receive(self) -> tuple[int, Batch]:
        """Return the next tokens of any sequence, with its index; there must be a running one.

        Raises:
            ApiError: the worker shuts down.
            EngineFailedError: the engine stopped.
        """
        while not self._arrived:
            await self._wait()
        index, batch = self._arrived.popleft()
        if any(event.finish is not None for event in batch):
            self._running.pop(index, None)
        return index, batch

    def end(self, index: int) -> None:
        """Let the engine drop sequence *index*: its text is complete."""
        generation = self._running.pop(index, None)
        if generation is not None:
            generation.abort()

    async def _wait(self) -> None:
        for index in self._running.keys() - set(self._waits.values()):
            self._waits[asyncio.create_task(_next(self._iterators[index]))] = index
        ends: list[asyncio.Future[Batch] | asyncio.Future[None]] = [*self._waits, self._interrupted]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._interrupted.done():
            raise errors.draining()
        for wait in [wait for wait in self._waits if wait.done()]:
            index = self._waits.pop(wait)
            self._arrived.append((index, wait.result()))

    def _abort(self) -> None:
        for generation in self._running.values():
            generation.abort()
        self._running.clear()


async def _next(batches: AsyncIterator[Batch]) -> Batch:
    """Return the next batch; a sequence that ends without a finish reason is the engine's failure."""
    try:
        return await anext(batches)
    except StopAsyncIteration:
        raise EngineFailedError("a sequence ended without a finish reason") from None
