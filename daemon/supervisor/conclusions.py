"""What became of readings of the configuration, and how what is on disk stands to what is in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from daemon.config.diff import Step
from daemon.errors import Problem

Result = Literal["applied", "noop", "rejected"]
ConfigState = Literal["applied", "rejected", "stale", "pending"]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What became of one reading of the configuration."""

    result: Result
    generation: int
    steps: tuple[Step, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Reloads:
    """What became of the passes since the start; *succeeded_at* is in seconds since the epoch."""

    applied: int = 0
    rejected: int = 0
    noop: int = 0
    succeeded_at: float | None = None

    def counted(self, result: Result, now: float) -> Reloads:
        """Return the counts after one more pass."""
        match result:
            case "rejected":
                return replace(self, rejected=self.rejected + 1)
            case "noop":
                return replace(self, noop=self.noop + 1, succeeded_at=now)
            case "applied":
                return replace(self, applied=self.applied + 1, succeeded_at=now)


@dataclass(frozen=True, slots=True)
class ConfigStatus:
    """What is on disk against what is in force; times are seconds since the epoch."""

    path: Path
    state: ConfigState = "applied"
    hash_on_disk: str | None = None
    hash_applied: str | None = None
    applied_at: float | None = None
    last_attempt_at: float | None = None
    generation: int = 0
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    pending: tuple[Step, ...] = ()
    reloads: Reloads = Reloads()

    def attempted(self, now: float) -> ConfigStatus:
        """Return the status once the files are read."""
        return replace(self, last_attempt_at=now)

    def applied(self, content_hash: str, warnings: Sequence[Problem], now: float) -> ConfigStatus:
        """Return the status once what *content_hash* stands for is in force."""
        return replace(
            self.unchanged(content_hash),
            hash_applied=content_hash,
            applied_at=now,
            generation=self.generation + 1,
            warnings=tuple(map(str, warnings)),
        )

    def unchanged(self, content_hash: str) -> ConfigStatus:
        """Return the status once what is on disk turned out to be in force."""
        return replace(self, state="applied", hash_on_disk=content_hash, problems=(), pending=())

    def refused(self, problems: tuple[Problem, ...]) -> ConfigStatus:
        """Return the status once what is on disk was refused; one that is stale stays so."""
        state: ConfigState = "stale" if self.state == "stale" else "rejected"
        return replace(self, state=state, hash_on_disk=None, problems=problems, pending=())

    def stale(self, problems: tuple[Problem, ...]) -> ConfigStatus:
        """Return the status where the last good configuration stands in for a broken one."""
        return replace(self, state="stale", hash_on_disk=None, problems=problems)

    def waiting(self, steps: Sequence[Step]) -> ConfigStatus:
        """Return the status of a file whose *steps* wait for `tqd reload`."""
        state: ConfigState = "pending" if steps else "applied"
        return replace(self, state=state, problems=(), pending=tuple(steps))

    def counted(self, result: Result, now: float) -> ConfigStatus:
        """Return the status after one more pass."""
        return replace(self, reloads=self.reloads.counted(result, now))
