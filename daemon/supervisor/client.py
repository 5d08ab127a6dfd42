"""Ask a running daemon, from the command line: the other end of the control socket."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

from daemon.errors import (
    ConfigError,
    DaemonUnreachableError,
    InProgressError,
    NotRunningError,
    Problem,
    TqdError,
    UnknownServerError,
)
from daemon.ops.document import Document
from daemon.ops.events import EventPage
from daemon.paths import StateDir
from daemon.supervisor.instance import holder
from daemon.supervisor.messages import Action, Change, Verdict

TIMEOUT_S = 10.0
PASS_TIMEOUT_S = 120.0  # a pass reads models' headers, and may wait to see a removal confirmed

_ERRORS: Mapping[int, type[TqdError]] = {
    error.exit_code: error
    for error in (TqdError, NotRunningError, UnknownServerError, InProgressError)
}


class Client:
    """Speaks to the daemon of one state folder."""

    def __init__(self, state: StateDir) -> None:
        self._state = state

    def running(self) -> bool:
        """Whether a daemon answers."""
        return self.status_if_running() is not None

    def status_if_running(self) -> Document | None:
        """Return the status document; None: no daemon answers."""
        try:
            return self.status()
        except DaemonUnreachableError:
            return None

    def status(self) -> Document:
        """Return the status document."""
        return cast("Document", self._call("GET", "/status"))

    def act(self, action: Action, names: Sequence[str] | None) -> dict[str, int]:
        """Start, stop or restart *names*, or all; return the launch that each had before."""
        body = {"servers": None if names is None else list(names)}
        return cast(
            "dict[str, int]", self._call("POST", f"/{action}", body, PASS_TIMEOUT_S)["launches"]
        )

    def reload(self) -> Verdict:
        """Make the daemon read its configuration again.

        Raises:
            ConfigError: it was refused; what runs goes on as before.
        """
        return cast("Verdict", self._call("POST", "/reload", timeout_s=PASS_TIMEOUT_S))

    def diff(self) -> list[Change]:
        """Return what `reload` would do; raises as `reload` does."""
        return cast("list[Change]", self._call("GET", "/diff", timeout_s=PASS_TIMEOUT_S)["steps"])

    def events(self, after: str | None, wait_s: float = 0.0) -> EventPage:
        """Return what happened after the event *after*, or all that is kept; wait for it if need be."""
        query = {"wait_s": wait_s} if after is None else {"wait_s": wait_s, "after": after}
        path = f"/events?{urlencode(query)}"
        return cast("EventPage", self._call("GET", path, timeout_s=wait_s + TIMEOUT_S))

    def shut_down(self) -> int:
        """Begin to end the daemon; return its pid."""
        return int(self._call("POST", "/shutdown")["pid"])

    def _call(
        self, method: str, path: str, body: object = None, timeout_s: float = TIMEOUT_S
    ) -> Any:
        connection = _UnixConnection(self._socket(), timeout_s)
        try:
            connection.request(
                method,
                path,
                body=None if body is None else json.dumps(body),
                headers={"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            answer = json.loads(response.read())
        except TimeoutError as error:
            raise DaemonUnreachableError(
                f"the daemon did not answer within {timeout_s:.0f} s", hint=self._hint()
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DaemonUnreachableError(
                f"no daemon answers on {self._socket()}", hint=self._hint()
            ) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise _error(answer["error"])
        return answer

    def _socket(self) -> Path:
        owner = holder(self._state)
        return owner.control if owner is not None else self._state.socket

    def _hint(self) -> str:
        owner = holder(self._state)
        if owner is None:
            return "`tqd start` starts the daemon"
        return f"its process is pid {owner.pid}; its log is {self._state.daemon_log}"


def _error(answer: Mapping[str, Any]) -> TqdError:
    if "problems" in answer:
        return ConfigError([Problem(**problem) for problem in answer["problems"]])
    kind = _ERRORS.get(answer["exit_code"], TqdError)
    error = kind(answer["message"], hint=answer["hint"])
    error.exit_code = answer["exit_code"]
    return error


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))
