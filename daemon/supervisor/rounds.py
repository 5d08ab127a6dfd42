"""Hear workers that have no news of their own all together, twice a second.

A heartbeat that wakes the daemon for itself costs several times as much as one that is read beside others.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket

EVERY_S = 0.5


class Rounds:
    """Channels that are read at the next round; between rounds nobody looks at them."""

    def __init__(self) -> None:
        self._waiting = selectors.DefaultSelector()
        self._timer: asyncio.TimerHandle | None = None

    def put_off(self, channel: socket.socket, transport: asyncio.Transport) -> None:
        """Let what comes next over *channel*, which *transport* reads, wait for a round."""
        if transport.is_closing():
            return
        transport.pause_reading()
        known = self._waiting.get_map().get(channel.fileno())
        if known is not None and known.data is not transport:
            self._waiting.unregister(
                known.fd
            )  # of a channel that broke; its number is this one's now
            known = None
        if known is None:
            self._waiting.register(channel, selectors.EVENT_READ, transport)
        if self._timer is None:
            self._begin()

    def leave(self, channel: socket.socket) -> None:
        """Read *channel* at once from now on, if it was ever put off."""
        with contextlib.suppress(KeyError, ValueError):  # it was not
            self._waiting.unregister(channel).data.resume_reading()

    def _begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._go)

    def _go(self) -> None:
        for key, _ in self._waiting.select(0):
            key.data.resume_reading()
        self._timer = None
        if self._waiting.get_map():
            self._begin()
