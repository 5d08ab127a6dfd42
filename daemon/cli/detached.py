"""Start a daemon that outlives the command, and see it come up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from daemon.errors import InProgressError, TqdError
from daemon.paths import StateDir
from daemon.supervisor.client import Client
from daemon.supervisor.files import make_private

POLL_S = 0.1


def start_daemon(config: Path, state: StateDir, timeout_s: float) -> None:
    """Start a daemon in the background and return when it answers.

    Raises:
        TqdError: it ended at once; says what it said, and carries its exit code.
        InProgressError: it does not answer in time.
    """
    words = state.daemon_log.with_name("startup.log")
    make_private(words.parent)
    words.touch(mode=0o600)
    with words.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "daemon"),
                *("--config", str(config), "--state-dir", str(state.root)),
                *("run", "--log-file", str(state.daemon_log)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    client = Client(state)
    if _until(lambda: client.running() or process.poll() is not None, timeout_s):
        if process.poll() is None or client.running():
            return
        error = TqdError(words.read_text(errors="replace").strip().removeprefix("tqd: "))
        error.exit_code = process.returncode
        raise error
    raise InProgressError(
        f"the daemon does not answer after {timeout_s:.0f} s (pid {process.pid})",
        hint=f"its log is {state.daemon_log}",
    )


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True
