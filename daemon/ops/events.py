"""What happens to servers and to their configuration, as typed events that any number of clients follow.

One ring holds the newest events and every client has only a place in it: a client that is too slow for
the ring is told to go, and costs nothing until then.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

CAPACITY = 1000  # a hundred servers that crash through a whole backoff make some 800

EventName = Literal[
    "server.added",  # an entry is new in the file
    "server.removed",  # an entry is gone from the file, and so is its process
    "server.changed",  # another state, or another reason for the same
    "config.reloaded",  # the file was read: applied, noop or rejected
    "config.pending",  # it has changes that wait for `tqd reload`
    "daemon.stopping",
    "events.missed",  # to one client: there were more than could be kept; read the status again
]
EVENT_NAMES: tuple[str, ...] = get_args(EventName)

_ID = re.compile(r"(?P<boot>[0-9a-f]{8})-(?P<seq>[0-9]{1,15})")


class EventJson(TypedDict):
    """An event as clients get it; *at* is ISO 8601 in UTC."""

    id: str
    seq: int
    at: str
    event: EventName
    data: Mapping[str, object]


class EventPage(TypedDict):
    """Events from somewhere on, for those who ask again and again; *last* is where to go on."""

    last: str
    missed: bool
    events: Sequence[EventJson]


@dataclass(frozen=True, slots=True)
class Batch:
    """Events after a place in the log; *missed*: there were more, or the place was another daemon's."""

    events: tuple[EventJson, ...]
    missed: bool = False


class EventLog:
    """The newest events. Everything happens on one event loop."""

    def __init__(self, *, capacity: int = CAPACITY, boot: str | None = None) -> None:
        self.closed = False
        self._boot = boot or secrets.token_hex(
            4
        )  # places in another daemon's log mean nothing here
        self._ring: deque[EventJson] = deque(maxlen=capacity)
        self._seq = 0
        self._news = asyncio.Event()
        self.waiting = 0  # clients

    @property
    def seq(self) -> int:
        """How many events there were since the daemon started."""
        return self._seq

    @property
    def last_id(self) -> str:
        """The id of the newest event."""
        return self.id_of(self._seq)

    def id_of(self, seq: int) -> str:
        """Return the id of event number *seq*."""
        return f"{self._boot}-{seq}"

    def seq_of(self, event_id: str) -> int | None:
        """Return the number of the event *event_id*, or None when it was not one of this daemon."""
        found = _ID.fullmatch(event_id)
        if found is None or found["boot"] != self._boot or int(found["seq"]) > self._seq:
            return None
        return int(found["seq"])

    def publish(self, name: EventName, at: str, data: Mapping[str, object]) -> None:
        """Append an event and wake everyone who waits."""
        self._seq += 1
        self._ring.append(
            {"id": self.last_id, "seq": self._seq, "at": at, "event": name, "data": data}
        )
        self._wake()

    def after(self, seq: int | None) -> Batch:
        """Return what came after event number *seq*; None is a place that is not known any more."""
        oldest = self._seq - len(self._ring)
        if seq is None or seq < oldest:
            return Batch(tuple(self._ring), missed=True)
        newer = self._seq - seq
        return Batch(tuple(self._ring)[len(self._ring) - newer :] if newer > 0 else ())

    async def wait(self, seq: int) -> None:
        """Return when there are events after number *seq*, or there will be none."""
        self.waiting += 1
        try:
            while self._seq <= seq and not self.closed:
                await self._news.wait()
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """Let everyone who waits go."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
