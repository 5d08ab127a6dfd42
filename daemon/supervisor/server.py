"""What a server is, as far as decisions about it need to know: data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from daemon.config.spec import ServerSpec
from daemon.policy.claim import Claim


class State(StrEnum):
    """What a server is observed to be."""

    STOPPED = "stopped"
    BLOCKED = "blocked"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"


class Desired(StrEnum):
    """What a server is meant to be."""

    RUNNING = "running"
    STOPPED = "stopped"


Ending = Literal[
    "stop", "restart", "replace", "stalled", "load_stalled", "spawn_timeout", "protocol"
]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


NO_MEMORY = "insufficient_memory"  # the code of a block that whoever divides the memory lifts


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a server is not simply running: a stable code, words, and what to do."""

    code: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """An entry of servers.yaml as a worker is started from it."""

    spec: ServerSpec
    spec_hash: str
    claim: Claim | None = None

    @property
    def address(self) -> Address:
        """Where a worker of this section listens."""
        return Address(self.spec.host, self.spec.port)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A server runs its previous section: *wanted* is the file's, *cause* why it did not become ready."""

    wanted: Section
    cause: Cause
    since: float


@dataclass(frozen=True, slots=True)
class LastExit:
    """How the last worker of a server ended; *code* is negative for a signal, as subprocess has it."""

    launch: int
    code: int | None
    at: float
    classified: str
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Worker:
    """The process of a server, as far as decisions need it.

    *moved_at* is the last sign of progress: spawn, hello, load progress, a pass of the engine's loop.
    *deadline* ends the drain, then the grace. *claim* is what it needs and wants of the memory, *share* what
    it was given, *promised* the most that it says it may come to use for the requests it has, *used* what
    was measured of it; all in bytes.
    """

    launch: int
    nonce: str
    spec_hash: str
    address: Address
    started_at: float
    moved_at: float
    pid: int | None = None
    stage: str | None = None
    fraction: float = 0.0
    generation: int = -1
    ready_at: float | None = None
    ending: Ending | None = None
    ending_message: str | None = None
    deadline: float | None = None
    killed: bool = False
    claim: Claim | None = None
    share: int = 0
    promised: int = 0
    used: int = 0

    @property
    def held_bytes(self) -> int:
        """The memory that nobody else can have while this worker lives."""
        return max(self.share, self.promised, self.used)


@dataclass(frozen=True, slots=True)
class Server:
    """One entry of servers.yaml and what has become of it; *spec* is the section in force."""

    name: str
    spec: ServerSpec
    spec_hash: str
    desired: Desired = Desired.STOPPED
    state: State = State.STOPPED
    since: float = 0.0
    cause: Cause | None = None
    worker: Worker | None = None
    launches: int = 0
    attempt_at: float | None = None
    """When `backoff` ends, or when the cause of `blocked` is looked at again."""
    failures: int = 0
    """Failures in a row; sets the delay."""
    restarts: tuple[float, ...] = ()
    """When restarts after a failure were decided, within the window."""
    restarts_total: int = 0
    last_exit: LastExit | None = None
    claim: Claim | None = None
    """What the next worker needs and wants of the memory; None: nothing is known."""
    previous: Section | None = None
    """Was ready before the section in force, which has not been yet: what a failed load goes back to."""
    divergence: Divergence | None = None

    @property
    def section(self) -> Section:
        """What the next worker is started from."""
        return Section(self.spec, self.spec_hash, self.claim)

    @property
    def address(self) -> Address:
        """Where the next worker will listen."""
        return Address(self.spec.host, self.spec.port)

    @property
    def live(self) -> bool:
        """Whether there is a worker that speaks."""
        return self.worker is not None and self.state is not State.STARTING

    @property
    def serving(self) -> bool:
        """Whether it is meant to run, and has a worker or gets one without anybody asking again."""
        coming = self.state in (State.STARTING, State.BACKOFF)
        return self.desired is Desired.RUNNING and (self.worker is not None or coming)

    @property
    def queued(self) -> bool:
        """Whether the server waits for its turn to be launched."""
        return self.state is State.STARTING and self.worker is None
