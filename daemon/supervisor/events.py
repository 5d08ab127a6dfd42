"""What can happen to a server, and what the world must do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from daemon.config.spec import ServerSpec
from daemon.policy.claim import Claim
from daemon.supervisor.server import Cause

Signal = Literal["TERM", "KILL"]


@dataclass(frozen=True, slots=True)
class Start:
    """The user, or the plan, wants it running; forgets past failures."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The user, or the plan, wants it stopped."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The user wants a new worker; forgets past failures."""


@dataclass(frozen=True, slots=True)
class Hurry:
    """Whoever is waiting has run out of patience: end the drain now. The grace stays."""


@dataclass(frozen=True, slots=True)
class Replace:
    """The entry changed in a way that needs a new worker; forgets past failures."""

    spec: ServerSpec
    spec_hash: str
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """The entry changed in a way that the running worker can take over."""

    spec: ServerSpec
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The environment does not let it start."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Unblock:
    """What kept it from starting is gone."""


@dataclass(frozen=True, slots=True)
class Grant:
    """It is this server's turn to be launched."""

    nonce: str
    share: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """The server's share of the memory is another, in bytes."""

    share: int


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process exists."""

    launch: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """There is no process, and why. *jitter* is -1 to 1."""

    launch: int
    cause: Cause
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker's first line."""

    launch: int
    nonce: str
    protocol: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The worker's model is being loaded."""

    launch: int
    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's model is loaded."""

    launch: int
    nonce: str
    spec_hash: str


@dataclass(frozen=True, slots=True)
class Beat:
    """The worker's engine loop has made *generation* passes; *promised* is the most memory it may come to use."""

    launch: int
    generation: int
    promised: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """The worker was seen to use so many bytes of memory."""

    launch: int
    used: int


@dataclass(frozen=True, slots=True)
class Garbled:
    """The worker said something that is not the protocol."""

    launch: int
    message: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone and reaped. *code* is negative for a signal; *jitter* is -1 to 1."""

    launch: int
    code: int
    tail: tuple[str, ...] = ()
    fatal: str | None = None
    hint: str | None = None
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at `wake_at`, harmless at any time."""


@dataclass(frozen=True, slots=True)
class Slept:
    """The machine, and with it every worker, stood still for *gap_s* seconds."""

    gap_s: float


Event = (
    Start | Stop | Restart | Hurry | Replace | Update | Block | Unblock | Grant | Share | Spawned | SpawnFailed
    | Hello | Progress | Ready | Beat | Measured | Garbled | Exited | Tick | Slept
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker on the server's address, with *share* bytes of memory."""

    name: str
    launch: int
    nonce: str
    share: int = 0


@dataclass(frozen=True, slots=True)
class SendDrain:
    """Tell the worker to refuse new requests, finish the running ones and exit."""

    name: str
    launch: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendLive:
    """Tell the worker about an entry, or a share of the memory, that changed."""

    name: str
    launch: int
    share: int = 0


@dataclass(frozen=True, slots=True)
class SendSignal:
    """TERM goes to the worker, KILL to its whole process group."""

    name: str
    launch: int
    signal: Signal


@dataclass(frozen=True, slots=True)
class Recheck:
    """Find out whether what blocks the server is gone; answer with `Block`, `Unblock` or `Replace`."""

    name: str


Effect = Spawn | SendDrain | SendLive | SendSignal | Recheck
