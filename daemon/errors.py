"""The tree of failures a user can meet; each knows its exit code and what to do about it.

TqdError                     1   something failed
├── ConfigError              2   servers.yaml, a policy or a command line value is wrong
├── NotRunningError          3   the server (or the daemon) is not running
├── UnknownServerError       4   no server of that name
├── InProgressError          5   what was asked for is still going on
├── DaemonUnreachableError   6   no daemon answers on the control socket
├── SnapshotError            1   a saved KV cache is corrupt, or not of this model, policy and version
└── WorkerExitError          ·   a worker cannot go on; the code tells the supervisor what to do
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum


class WorkerExit(IntEnum):
    """Exit codes of a worker and what the supervisor makes of them (BSD sysexits where one fits)."""

    OK = 0
    MODEL_MISSING = 66  # EX_NOINPUT: blocked until the model appears
    PORT_TAKEN = 69  # EX_UNAVAILABLE: blocked until the port is free
    ENGINE_FAILED = 70  # EX_SOFTWARE: the generation thread died; retried with backoff
    BAD_CONFIG = 78  # EX_CONFIG: bad policy or model; failed at once, no retries


class TqdError(Exception):
    """A failure to show to a user: one message, and a hint that says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration, and where.

    *line* and *col* count from 1; 0 means the whole file. *path* is the dotted key.
    """

    file: str
    line: int
    col: int
    path: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.col}: " if self.line else f"{self.file}: "
        where = f"{self.path}: " if self.path else ""
        text = f"{place}{where}{self.message}"
        return text if self.hint is None else f"{text}\n  hint: {self.hint}"


class ConfigError(TqdError):
    """A configuration was refused; carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NotRunningError(TqdError):
    """The named server, or the daemon, is not running."""

    exit_code = 3


class UnknownServerError(TqdError):
    """No server has that name."""

    exit_code = 4

    @classmethod
    def among(cls, known: Collection[str], name: str, config_state: str) -> UnknownServerError:
        """Return the error for *name*, which a file in another state than applied may well hold."""
        hint = f"one of {', '.join(known)}" if known else "there is none in servers.yaml"
        if config_state != "applied":
            hint += f"; but the newest servers.yaml is not in force ({config_state}): `tqd status` says why"
        return cls(f'no server is called "{name}"', hint=hint)


class InProgressError(TqdError):
    """The wait ended before what was asked for was done; it goes on."""

    exit_code = 5


class DaemonUnreachableError(TqdError):
    """No daemon answers on the control socket."""

    exit_code = 6


class WorkerExitError(TqdError):
    """A worker cannot serve and must exit with *code*, so that the supervisor knows what to do."""

    def __init__(self, code: WorkerExit, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class SnapshotError(TqdError):
    """A saved KV cache cannot be used, or none can be saved; nothing that runs has changed."""


class PolicyError(TqdError):
    """A KV policy cannot be applied to a model; *path* is relative to the `kv` block."""

    exit_code = 2

    def __init__(self, path: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path


def first_line(error: BaseException) -> str:
    """Return the first line of what *error* says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
