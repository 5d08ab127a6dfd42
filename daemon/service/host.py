"""What launchd and systemd have in common, as seen from here, and how they are asked: never through a shell."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from daemon.errors import TqdError
from daemon.service.unit import Installed, Paths

ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Condition:
    """What the host says of the service. *detail* is its own word for how that is."""

    enabled: bool
    running: bool
    pid: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended, and what it said."""

    code: int
    output: str
    error: str


class Host(Protocol):
    """The program that starts services here, for one scope."""

    @property
    def kind(self) -> str:
        """``systemd`` or ``launchd``, as `tqd run --service` has it."""

    @property
    def path(self) -> Path:
        """Where the service's file is."""

    def render(self, paths: Paths) -> str:
        """Return what that file should say."""

    def read(self, text: str) -> Installed:
        """Return what the file *text* runs."""

    def install(self) -> None:
        """Take notice of the file, and start the service at every login or boot from now on."""

    def start(self) -> None:
        """Start the service now, as its file says."""

    def remove(self, timeout_s: float) -> None:
        """Stop the service, and do not start it any more."""

    def forget(self) -> None:
        """Take notice that the file is gone."""

    def condition(self) -> Condition:
        """Return how the service is."""

    def advice(self) -> str | None:
        """Return what the user may want to do besides."""


def ask(command: Sequence[str], *, timeout_s: float = ASK_TIMEOUT_S) -> Answer:
    """Run *command* and return how it ended.

    Raises:
        TqdError: there is no such program, or it does not end.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise TqdError(
            f"{command[0]} cannot be run: {error.strerror}",
            hint="this machine starts no services with it; `tqd start` runs the daemon without one",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise TqdError(f"`{' '.join(command)}` has not ended after {timeout_s:.0f} s") from error
    return Answer(done.returncode, done.stdout.strip(), done.stderr.strip())


def refusal(command: Sequence[str], answer: Answer, hint: str | None) -> TqdError:
    """Return the error to raise when *command* has failed."""
    said = answer.error or answer.output or f"exit code {answer.code}"
    return TqdError(f"`{' '.join(command)}` failed: {said}", hint=hint)
