"""Tell systemd how the daemon is doing: one datagram each, and nothing at all outside of systemd.

The protocol is sd_notify(3). The watchdog is fed from the reconciler's loop and from nowhere else: a
daemon that no longer decides anything must not look alive.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping


class Notifier:
    """Speaks to $NOTIFY_SOCKET of *environ*, if there is one."""

    def __init__(
        self, environ: Mapping[str, str], *, pid: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = _socket_name(environ.get("NOTIFY_SOCKET", ""))
        self._clock = clock
        self._fed_at = float("-inf")
        self._feed_every_s = _watchdog_s(environ, pid)
        self._status = ""
        self._stopping = False

    @property
    def listening(self) -> bool:
        """Whether anybody is told."""
        return self._address is not None

    def ready(self) -> None:
        """The daemon can be talked to."""
        if not self._stopping:
            self._send("READY=1")

    def reloading(self) -> None:
        """The configuration is being read again; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(self._clock() * 1e6)}")

    def stopping(self) -> None:
        """The daemon is on its way out; said once."""
        if not self._stopping:
            self._stopping = True
            self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """Show *text* in ``systemctl status``."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def extend(self, seconds: float) -> None:
        """Ask for *seconds* more before a start or a stop counts as hung."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def turned(self) -> None:
        """The reconciler made progress: feed the watchdog when it is due."""
        now = self._clock()
        if self._feed_every_s is not None and now - self._fed_at >= self._feed_every_s:
            self._fed_at = now
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if self._address is None:
            return
        # systemd being away or busy must not hold the daemon up
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel,
        ):
            channel.setblocking(False)
            channel.connect(self._address)
            channel.send(text.encode())


def _socket_name(value: str) -> str | None:
    """Return the address of the notify socket; a leading ``@`` stands for the abstract namespace."""
    if value.startswith("@"):
        return "\0" + value[1:]
    return value if value.startswith("/") else None


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Return how often to feed the watchdog: half of what systemd allows; None when it does not watch *pid*."""
    limit_us = environ.get("WATCHDOG_USEC", "")
    if not limit_us.isdigit() or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(limit_us) / 2e6
