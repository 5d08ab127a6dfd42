"""The worker's end of the channel to its supervisor: JSON lines over one socket.

Two threads do the waiting: one reads, so that the end of the lease is noticed even while the event loop is stuck;
one writes, so that a supervisor that stops reading never stops a token.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

from pydantic import ValidationError

from daemon.config.wire import (
    PROTOCOL,
    Drain,
    Live,
    Message,
    Snapshot,
    WorkerSpec,
    encode,
    to_worker,
)
from daemon.errors import WorkerExit, WorkerExitError
from daemon.log import get_logger

# A snapshot is stale after a second: with this many lines unsent, a new one adds nothing.
_BACKLOG_LIMIT = 32


class Channel:
    """The channel of one worker, over a connected stream socket that it now owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="channel-out", daemon=True)
        self._writer.start()

    def read_spec(self) -> WorkerSpec | None:
        """Wait for the first line and return it; None: the supervisor is gone already.

        Raises:
            WorkerExitError: the line is no spec of our protocol.
        """
        try:
            line = self._lines.readline()
        except OSError:
            return None
        if not line:
            return None
        try:
            message = to_worker.validate_json(line)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise WorkerExitError(
                WorkerExit.BAD_CONFIG,
                f"the worker spec is not valid: {place}: {error.errors()[0]['msg']}",
                hint="supervisor and worker are of different versions; restart the daemon",
            ) from None
        if not isinstance(message, WorkerSpec):
            raise WorkerExitError(
                WorkerExit.BAD_CONFIG, f"the first message is {message.type}, not spec"
            )
        if message.protocol != PROTOCOL:
            raise WorkerExitError(
                WorkerExit.BAD_CONFIG,
                f"the supervisor speaks protocol {message.protocol}, this worker {PROTOCOL}",
                hint="restart the daemon, so that both are of the same version",
            )
        return message

    def listen(self, received: Callable[[Live | Drain], None], lost: Callable[[], None]) -> None:
        """Call *received* for each further message and *lost* at the end, all on a thread of its own."""
        thread = threading.Thread(
            target=self._read, args=(received, lost), name="channel-in", daemon=True
        )
        thread.start()

    def send(self, message: Message) -> bool:
        """Queue *message*; never waits, works from any thread. False: it adds nothing to those unsent."""
        if isinstance(message, Snapshot) and self._outgoing.qsize() > _BACKLOG_LIMIT:
            return False
        self._outgoing.put(encode(message))
        return True

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for *timeout_s* seconds at most."""
        self._outgoing.put(None)
        self._writer.join(timeout_s)

    def _read(self, received: Callable[[Live | Drain], None], lost: Callable[[], None]) -> None:
        try:
            for line in self._lines:
                self._deliver(line, received)
        except OSError:
            pass  # a reset socket is as gone as a closed one
        lost()

    def _deliver(self, line: bytes, received: Callable[[Live | Drain], None]) -> None:
        try:
            message = to_worker.validate_json(line)
        except ValidationError as error:
            get_logger().warning("worker.protocol_failed", problem=error.errors()[0]["msg"])
            return
        if isinstance(message, WorkerSpec):
            get_logger().warning("worker.protocol_failed", problem="a second spec")
            return
        received(message)

    def _write(self) -> None:
        while (line := self._outgoing.get()) is not None:
            try:
                self._connection.sendall(line)
            except OSError:
                return  # the reading thread sees the same end and acts on it
