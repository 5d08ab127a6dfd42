"""The world around a supervisor, in memory: a file, processes, ports, memory, users and a clock.

One seeded scheduler decides everything. What the world knows that the supervisor does not (which worker
is hung, which text was half of a file) is the oracle for the invariants.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from daemon.config.prepare import Blocked, PreparedServer
from daemon.config.spec import ProbeSpec, RestartSpec, ServerSpec
from daemon.policy.claim import Claim
from daemon.supervisor.intake import Look
from tests.supervisor import configurations

FILE = Path("servers.yaml")
PORTS = tuple(range(1, 9))

MAX_RESTARTS = 3
WINDOW_S = 60.0
STABLE_S = 20.0
FIRST_BACKOFF_S = 1.0
STALL_S = 12.0
LOAD_STALL_S = 15.0
DRAIN_S = 5.0
GRACE_S = 4.0
BEAT_S = 4.0
GIB = 2**30
CLAIM = Claim(8 * GIB, 0, 0, sequence_bytes=2 * GIB, most_kv_bytes=6 * GIB)
BUDGET = 45 * GIB  # four servers fit, a fifth does not


Fate = Literal["good", "bad"]


class BrokenError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One server of the file: *version* needs another worker, *label* does not, a bad *fate* never loads."""

    name: str
    port: int
    version: int = 0
    label: int = 0
    enabled: bool = True
    autostart: bool = True
    fate: Fate = "good"

    @property
    def spec_hash(self) -> str:
        return f"{self.name}-{self.port}-{self.version}-{self.fate}"


@dataclass(frozen=True, slots=True)
class Text:
    """What the file says; *partial* is a half of what is being written."""

    entries: tuple[Entry, ...] = ()
    parallel: int = 1
    broken: bool = False
    partial: bool = False
    number: int = 0

    @property
    def valid(self) -> bool:
        ports = [it.port for it in self.entries]
        return not self.broken and len(ports) == len(set(ports))

    def by_name(self) -> dict[str, Entry]:
        return {it.name: it for it in self.entries}


@cache
def prepared_server(entry: Entry, missing: bool) -> PreparedServer:
    spec = ServerSpec(
        model="m",
        port=entry.port,
        enabled=entry.enabled,
        autostart=entry.autostart,
        labels={"label": str(entry.label)},
        restart=RestartSpec(
            max=MAX_RESTARTS,
            window=WINDOW_S,
            backoff=(FIRST_BACKOFF_S, 8.0),
            stable_after=STABLE_S,
        ),
        probe=ProbeSpec(interval=1.0, stall=STALL_S, load_stall=LOAD_STALL_S),
        drain_timeout=DRAIN_S,
        stop_grace=GRACE_S,
    )
    blocked = Blocked("model_missing", "no such folder", None) if missing else None
    return configurations.server(entry.name, spec, entry.spec_hash, blocked, CLAIM)


@dataclass(slots=True, eq=False)
class Process:
    """A worker; what is wrong with it is known to the world only."""

    pid: int
    name: str
    launch: int
    nonce: str
    spec_hash: str
    port: int
    label: int
    born: float
    touch: int
    alive: bool = True
    ready_at: float | None = None
    generation: int = 0
    memory: int = 1
    faulty: bool = False
    """Silent, hung, lying: whoever ends it is right."""
    deaf: bool = False
    hung: bool = False
    draining_since: float | None = None
    hurried: bool = False
    term_at: float | None = None
    orphaned_at: float | None = None


@dataclass(order=True, slots=True)
class Due:
    """Something that happens at *at*."""

    at: float
    number: int
    act: Callable[..., None] = field(compare=False)
    arguments: tuple[Any, ...] = field(compare=False)


class World:
    """Time, the file, processes, ports and memory; *chances* are probabilities of faults."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.trace: list[str] = []
        self.faults = True
        self.text: Text | None = Text()
        self.identity = 0
        self.missing: set[str] = set()
        self.thieves: set[int] = set()
        self.processes: dict[int, Process] = {}
        self.capacity = 3
        self.on_write: Callable[[], None] = lambda: None
        self._due: list[Due] = []
        self._number = 0
        self._pid = 100

    # time

    def after(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._due, Due(self.now + delay, self._number, act, arguments))

    def next_at(self) -> float:
        return self._due[0].at if self._due else float("inf")

    def happen(self) -> None:
        due = heapq.heappop(self._due)
        self.now = max(self.now, due.at)
        due.act(*due.arguments)

    def sleep(self, gap: float) -> None:
        """The machine stands still, with everything on it."""
        self._due = [Due(it.at + gap, it.number, it.act, it.arguments) for it in self._due]
        for process in self.alive():
            process.born += gap
            if process.ready_at is not None:
                process.ready_at += gap
        self.now += gap

    def chance(self, probability: float) -> bool:
        return self.faults and self.rng.random() < probability

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:9.3f} {text}")

    # the file

    def write(self, text: Text | None) -> None:
        self.identity += 1
        self.text = text if text is None else replace(text, number=self.identity)
        self.note(f"file {_say(text)}")
        self.on_write()

    def look(self) -> Look:
        return {FILE: None if self.text is None else (0, 0, self.identity, 0)}

    # ports and processes

    def alive(self) -> Iterator[Process]:
        return (it for it in self.processes.values() if it.alive)

    def port_is_free(self, port: int) -> bool:
        return port not in self.thieves and all(it.port != port for it in self.alive())

    def start_process(
        self, name: str, launch: int, nonce: str, spec_hash: str, port: int, label: int, touch: int
    ) -> Process:
        self._pid += 1
        process = Process(
            self._pid, name, launch, nonce, spec_hash, port, label, born=self.now, touch=touch
        )
        self.processes[process.pid] = process
        self.note(f"{name}#{launch} is born as pid {process.pid} with {spec_hash} on port {port}")
        return process

    def over_memory(self) -> Process | None:
        """Return whom the system would kill, if it is out of memory."""
        users = [it for it in self.alive() if it.ready_at is not None]
        if sum(it.memory for it in users) <= self.capacity or not users:
            return None
        return self.rng.choice(users)


def _say(text: Text | None) -> str:
    if text is None:
        return "is deleted"
    kind = "partial " if text.partial else ""
    if text.broken:
        return f"{kind}broken"
    entries = " ".join(
        f"{it.spec_hash}.{it.label}{'' if it.enabled else ' off'}{'' if it.autostart else ' idle'}"
        for it in text.entries
    )
    return f"{kind}[{entries}]"
