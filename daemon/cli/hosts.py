"""Which services there are on this machine: what `tqd service`, `tqd start` and `tqd doctor` go by."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import platformdirs

from daemon.errors import InProgressError, TqdError
from daemon.paths import StateDir
from daemon.service.host import Host
from daemon.service.launchd import Launchd
from daemon.service.systemd import Systemd
from daemon.service.unit import Installed, Scope
from daemon.supervisor.client import Client
from daemon.supervisor.files import read_json, write_private

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Service:
    """An installed service: whose it is, what its file says, and what that runs."""

    scope: Scope
    host: Host
    text: str
    runs: Installed


def host(scope: Scope) -> Host:
    """Return what starts services of *scope* on this platform."""
    if sys.platform == "darwin":
        return Launchd(scope, Path.home(), os.getuid())
    return Systemd(scope, platformdirs.user_config_path().absolute())


def installed(scope: Scope) -> Service | None:
    """Return the service of *scope*, if there is one.

    Raises:
        TqdError: its file cannot be read.
    """
    found = host(scope)
    try:
        text = found.path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        raise TqdError(f"{found.path} cannot be read: {error}") from error
    return Service(scope, found, text, found.read(text))


def service_of(state: StateDir) -> Service | None:
    """Return the service that runs the daemon of *state*, if one does."""
    return next(_services_of(state), None)


def _services_of(state: StateDir) -> Iterator[Service]:
    for scope in Scope:
        service = installed(scope)
        if service is not None and service.runs.state == state.root:
            yield service


def start_service(service: Service, config: Path, state: StateDir, timeout_s: float) -> None:
    """Start *service* and return when its daemon answers.

    Raises:
        TqdError: it is for another file than *config*, or its daemon does not come up; says why.
        InProgressError: it does not answer in time.
    """
    if service.runs.config != config:
        raise TqdError(
            f"the installed service runs {service.runs.config}, not {config}",
            hint="`tqd service install` makes it run this file; another --state-dir is another daemon",
        )
    earlier = refusal(state)

    def ended() -> TqdError | None:
        latest = refusal(state)
        if latest is None or latest == earlier:
            return None
        error = TqdError(f"the service ended at once: {latest.message}")
        error.exit_code = latest.exit_code
        return error

    until = time.monotonic() + timeout_s
    try:
        service.host.start()
    except TqdError as error:
        raise ended() or error from error
    client = Client(state)
    while not client.running():
        if reason := ended():
            raise reason
        if time.monotonic() >= until:
            raise InProgressError(
                f"the service was started, but its daemon does not answer after {timeout_s:.0f} s",
                hint="`tqd service status` shows how it is",
            )
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a daemon of a service has ended for good."""

    at: str
    message: str
    exit_code: int


def record_refusal(state: StateDir, error: TqdError) -> None:
    """Leave word of why the daemon of a service ends, for those who find it not running."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    word = asdict(Refusal(at, str(error), error.exit_code))
    with contextlib.suppress(OSError):  # the state folder may be what is wrong
        write_private(state.refused, json.dumps(word).encode())


def refusal(state: StateDir) -> Refusal | None:
    """Return why the last daemon of a service ended where starting it again cannot help; None once one runs."""
    match read_json(state.refused):
        case {"at": str(at), "message": str(message), "exit_code": int(code)}:
            return Refusal(at, message, code)
        case _:
            return None
