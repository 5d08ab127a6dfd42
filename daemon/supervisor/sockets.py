"""Hold the servers' listening sockets, and answer 503 on those whose worker is away."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
from aiohttp import web

from daemon.errors import TqdError
from daemon.supervisor.listeners import Listener
from daemon.supervisor.server import Address, Server, State

BACKLOG = 512  # connections that wait in the kernel while one worker follows another
MAX_RETRY_AFTER_S = 30  # clients take a longer Retry-After for a reason to give up


class AddressTakenError(TqdError):
    """A server's address cannot be had."""


@dataclass(slots=True)
class _Held:
    socket: socket.socket
    away: Server | None = None
    runner: web.ServerRunner | None = None


class Sockets:
    """Listening sockets by address. *clock* is the one that the servers' times are read from."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[Address, _Held] = {}
        self._reserved: set[Address] = set()
        self.unsettled = True
        """Whether the next `arrange` may find something to do although nobody's wishes changed."""

    def get(self, address: Address) -> socket.socket | None:
        """Return the socket held for *address*, or None."""
        held = self._held.get(address)
        return None if held is None else held.socket

    def reserve(self, address: Address) -> None:
        """Make sure that *address* can be had, and hold it until `settle`.

        A socket of ours on the same port is no obstacle: the servers of one file share no port, so
        the edit that moves one server there moves the other away.

        Raises:
            AddressTakenError: somebody else has it, or the host is none of this machine's.
        """
        if not self._holds(address):
            self._held[address] = _Held(bind(address))
            self._reserved.add(address)
            self.unsettled = True

    def try_out(self, address: Address) -> None:
        """Make sure that `reserve` would succeed, and raise as it does; nothing is held."""
        if not self._holds(address):
            try_out(address)

    def settle(self) -> None:
        """Forget the reservations: the next `arrange` closes what nobody wants."""
        self._reserved.clear()
        self.unsettled = True

    async def arrange(
        self, wanted: Mapping[Address, Listener]
    ) -> Mapping[Address, AddressTakenError]:
        """Hold the sockets of *wanted* and no others; return those that cannot be had, and why."""
        self.unsettled = bool(self._reserved)
        for address in self._held.keys() - wanted.keys() - self._reserved:
            held = self._held.pop(address)
            await _fall_silent(held)
            held.socket.close()
        refused = {}
        for address in wanted.keys() - self._held.keys():
            try:
                self._held[address] = _Held(bind(address))
            except AddressTakenError as error:
                refused[address] = error
        for address, held in list(self._held.items()):  # a reservation may come in meanwhile
            held.away = wanted[address].away if address in wanted else None
            if held.away is None:
                await _fall_silent(held)
            elif held.runner is None:
                await self._answer(held)
        return refused

    async def close(self) -> None:
        """Let go of every socket."""
        self.settle()
        await self.arrange({})

    def _holds(self, address: Address) -> bool:
        return any(held.port == address.port for held in self._held)

    async def _answer(self, held: _Held) -> None:
        async def unavailable(request: web.BaseRequest) -> web.StreamResponse:
            return _unavailable(held.away, self._clock())

        held.runner = web.ServerRunner(
            web.Server(unavailable, access_log=None), shutdown_timeout=0.5
        )
        await held.runner.setup()
        # asyncio closes the socket it served on; the worker to come needs the original
        await web.SockSite(held.runner, held.socket.dup(), backlog=BACKLOG).start()


async def _fall_silent(held: _Held) -> None:
    runner, held.runner = held.runner, None
    if runner is not None:
        await runner.cleanup()


def _unavailable(server: Server | None, now: float) -> web.Response:
    retry_after_s, message = 1, "the server is about to start"
    if server is not None:
        message = f"server {server.name} is {server.state}"
        if server.cause is not None:
            message += f": {server.cause.message}"
        if server.state is State.BACKOFF and server.attempt_at is not None:
            wait_s = max(server.attempt_at - now, 0)
            message += f"; next attempt in {wait_s:.0f} s"
            retry_after_s = min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)
    error = {"message": message, "type": "server_error", "param": None, "code": "unavailable"}
    response = web.json_response(
        {"error": error}, status=503, headers={"Retry-After": str(retry_after_s)}
    )
    response.force_close()
    return response


def bind(address: Address) -> socket.socket:
    """Return a listening socket on *address*.

    Raises:
        AddressTakenError: it cannot be had; the message names the holder where that can be known.
    """
    sock = _bound(address)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _refusal(address, error) from error
    return sock


def try_out(address: Address) -> None:
    """Make sure that *address* can be had, without ever listening there; raises as `bind` does."""
    _bound(address).close()


def _bound(address: Address) -> socket.socket:
    try:
        family, kind, proto, _, where = _resolve(address)
    except socket.gaierror as error:
        raise AddressTakenError(
            f"host {address.host!r} cannot be resolved: {error.strerror}",
            hint="write an address of this machine, such as 127.0.0.1",
        ) from error
    with contextlib.ExitStack() as undo:
        try:
            sock = undo.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(where)
        except OSError as error:
            raise _refusal(address, error) from error
        undo.pop_all()
    return sock


def _resolve(
    address: Address,
) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    found.sort(key=lambda info: info[0] != socket.AF_INET)  # localhost means 127.0.0.1 first
    family, kind, proto, name, where = found[0]
    return family, kind, proto, name, (str(where[0]), int(where[1]))


def _refusal(address: Address, error: OSError) -> AddressTakenError:
    if error.errno == errno.EADDRINUSE:
        return AddressTakenError(
            f"port {address.port} is in use{_holder(address.port)}",
            hint="end that process or write another port",
        )
    if error.errno == errno.EACCES:
        return AddressTakenError(
            f"port {address.port} may not be opened by this user",
            hint="write a port above 1023",
        )
    return AddressTakenError(
        f"cannot listen on {address}: {os.strerror(error.errno or 0)}",
        hint="write an address of this machine, such as 127.0.0.1",
    )


def _holder(port: int) -> str:
    """Return `` by pid N (name)`` when the system lets us see who listens on *port*."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
