"""Turn what is in servers.yaml into what is wanted, again and again, without ever losing what runs.

One pass reads the files once, compares, proves that new addresses can be had, and hands the accepted
edit to the reconciler whole. Whatever is wrong rejects the whole edit and disturbs nothing. Passes
follow one another; while one runs, any number of requests wait for the next one together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from daemon.config.diff import Live, Replace, Start, Step, Stop, diff
from daemon.config.load import Loaded, RejectedError, load
from daemon.config.prepare import PreparedServer, prepare
from daemon.config.spec import DaemonSpec
from daemon.errors import ConfigError, Problem
from daemon.log import get_logger
from daemon.paths import StateDir
from daemon.supervisor import lifecycle, plan
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.last_good import LastGood
from daemon.supervisor.lifecycle import Address, Cause, State
from daemon.supervisor.reconcile import Reconciler, Wanted
from daemon.supervisor.sockets import AddressTakenError, Sockets
from daemon.supervisor.watch import Look, Watch, look

REMOVAL_CONFIRM_S = 5.0  # an edit that removes this much may be half of a file that is being written
MANY = 4

ConfigState = Literal["applied", "rejected", "stale", "pending"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one reading of the configuration."""

    result: Literal["applied", "unchanged", "rejected"]
    steps: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigStatus:
    """What `status` tells about servers.yaml; times are seconds since the epoch."""

    path: Path
    state: ConfigState = "applied"
    hash_on_disk: str | None = None
    hash_applied: str | None = None
    applied_at: float | None = None
    last_attempt_at: float | None = None
    generation: int = 0
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
