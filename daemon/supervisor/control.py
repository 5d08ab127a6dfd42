"""The control socket: JSON over HTTP on a unix socket that only this user can open."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from daemon.errors import ConfigError, TqdError
from daemon.ops.document import problem_status
from daemon.ops.events import EventPage
from daemon.ops.written import Written
from daemon.supervisor.files import make_private
from daemon.supervisor.messages import Action, Change, Verdict


class Commands(Protocol):
    """What the control socket may ask of the daemon; a `TqdError` is the answer to a wrong question."""

    def status(self) -> Written:
        """Return the status document."""

    async def act(self, action: Action, names: Sequence[str] | None) -> Mapping[str, int]:
        """Start, stop or restart *names*, or all; return the launch that each had before."""

    async def reload(self) -> Verdict:
        """Read the configuration again and apply it."""

    async def diff(self) -> Sequence[Change]:
        """Return what `reload` would do."""

    async def events(self, after: str | None, wait_s: float) -> EventPage:
        """Return what happened after the event *after*, or all that is kept; wait for it if need be."""

    def shut_down(self) -> None:
        """Begin to end the daemon."""


class ControlSocket:
    """Serves *commands* on the unix socket *path*."""

    def __init__(self, path: Path, commands: Commands) -> None:
        self._path = path
        self._commands = commands
        self._socket: socket.socket | None = None
        self._runner: web.AppRunner | None = None

    def bind(self) -> None:
        """Listen; whoever connects waits until `serve`.

        Raises:
            TqdError: the place of the socket is taken, or others could write to it.
        """
        self._socket = _listen(self._path)

    async def serve(self) -> None:
        """Begin to answer."""
        if self._socket is None:
            raise ValueError("bind first")
        app = web.Application(middlewares=[self._answer_errors])
        app.add_routes(
            [
                web.get("/status", self._status),
                web.get("/diff", self._diff),
                web.get("/events", self._events),
                web.post("/reload", self._reload),
                web.post("/shutdown", self._shut_down),
                web.post("/{action:start|stop|restart}", self._act),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket is not None:
            self._socket.close()
            self._path.unlink(missing_ok=True)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConfigError as error:
            return _refusal(error, 422, problems=[problem_status(it) for it in error.problems])
        except TqdError as error:
            return _refusal(error, 409)
        except OSError as error:
            return _refusal(TqdError(f"the daemon could not do that: {error}"), 500)

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(body=self._commands.status().body, content_type="application/json")

    async def _diff(self, request: web.Request) -> web.Response:
        return web.json_response({"steps": list(await self._commands.diff())})

    async def _events(self, request: web.Request) -> web.Response:
        query = request.query
        page = await self._commands.events(query.get("after"), float(query.get("wait_s", "0")))
        return web.json_response(page)

    async def _reload(self, request: web.Request) -> web.Response:
        return web.json_response(await self._commands.reload())

    async def _shut_down(self, request: web.Request) -> web.Response:
        self._commands.shut_down()
        return web.json_response({"pid": os.getpid()})

    async def _act(self, request: web.Request) -> web.Response:
        names = await _names(request)
        action = cast("Action", request.match_info["action"])  # the route admits no other
        launches = await self._commands.act(action, names)
        return web.json_response({"launches": dict(launches)})


async def _names(request: web.Request) -> list[str] | None:
    body: object = None
    with contextlib.suppress(ValueError):
        body = await request.json()
    match body:
        case {"servers": None}:
            return None
        case {"servers": [*names]} if all(isinstance(name, str) for name in names):
            return names
        case _:
            raise TqdError('the body must be {"servers": ["name", ...]}, or null for all of them')


def _refusal(error: TqdError, status: int, **more: object) -> web.Response:
    body = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    return web.json_response({"error": body | more}, status=status)


def _listen(path: Path) -> socket.socket:
    """Return a listening unix socket on *path*, mode 0600 from the first moment.

    The caller holds the lock of the state folder, so a socket that nobody answers is a left-over.
    """
    _secure_folder(path.parent)
    if path.is_socket():
        if _answers(path):
            raise TqdError(
                f"another program listens on {path}", hint="set daemon.control to another path"
            )
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen()
    except OSError as error:
        sock.close()
        raise TqdError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(mask)
    return sock


def _secure_folder(folder: Path) -> None:
    try:
        make_private(folder)
        found = folder.stat()
    except OSError as error:
        raise TqdError(
            f"the control socket cannot live in {folder}: {error.strerror}",
            hint="set daemon.control to a path in a folder of yours",
        ) from error
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (os.getuid(), 0) or shared:
        raise TqdError(
            f"the control socket cannot live in {folder}: others may write there",
            hint=f"chmod go-w {folder}",
        )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(str(path)) == 0
