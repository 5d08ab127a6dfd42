"""Decide what all servers together do next: the pure core of the reconciler.

A `Fleet` holds every server. *step* hands an event to the server that it concerns, then launches
what may be launched: in the order of waiting, `max_parallel_loads` at a time, never while an older
process of the same server, or of the same address, still lives, and never without the memory it needs
(daemon.supervisor.room).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from daemon.config.spec import ServerSpec
from daemon.policy.claim import Claim
from daemon.supervisor import deadlines, events, lifecycle, room
from daemon.supervisor.events import Effect
from daemon.supervisor.server import Cause, Desired, Divergence, Server, State


@dataclass(frozen=True, slots=True)
class Fleet:
    """Every server, in the order of the file."""

    boot: str
    """Random, one per daemon: makes nonces that no other daemon has."""
    servers: Mapping[str, Server] = field(default_factory=dict)
    max_parallel_loads: int = 1
    removed: frozenset[str] = frozenset()
    """No longer in the file: forgotten once their process is gone."""
    waits: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """server → servers whose memory it waits for."""
    leftovers: Mapping[str, int] = field(default_factory=dict)
    """server → pid of a worker of an earlier daemon; nothing of that name is launched while it lives."""
    launched: Mapping[str, int] = field(default_factory=dict)
    """server → the number of its last launch, for servers that come (back): numbers only grow."""
    closing: bool = False
    budget: int | None = None
    """Bytes that all servers together may use; None: nobody counts."""
    available: int | None = None
    """Bytes that the machine could hand out when it was last looked at."""


@dataclass(frozen=True, slots=True)
class Told:
    """Something happened to one server."""

    name: str
    event: events.Event


@dataclass(frozen=True, slots=True)
class Beats:
    """Heartbeats of many workers; dealing with them together costs hardly more than one."""

    news: tuple[Told, ...]


@dataclass(frozen=True, slots=True)
class Remove:
    """The entry is gone from the file."""

    name: str


@dataclass(frozen=True, slots=True)
class Put:
    """The entry is new, or needs another worker; *blocked* says why it cannot start now."""

    name: str
    spec: ServerSpec
    spec_hash: str
    desired: Desired
    blocked: Cause | None = None
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class Adjust:
    """The running worker can take the change over."""

    name: str
    spec: ServerSpec
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class Apply:
    """An accepted edit, whole. Removals come first, so that what they free is there for additions."""

    changes: tuple[Remove | Put | Adjust, ...]
    max_parallel_loads: int
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory was looked at: the bytes that workers use, by server and launch, and what is available."""

    used: Mapping[tuple[str, int], int]
    available: int | None


@dataclass(frozen=True, slots=True)
class LeftoverGone:
    """The earlier daemon's worker of server *name* is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The machine slept for *gap_s* seconds."""

    gap_s: float


@dataclass(frozen=True, slots=True)
class Close:
    """The daemon ends: stop every worker, launch nothing any more. What is desired stays."""


@dataclass(frozen=True, slots=True)
class Hasten:
    """Whoever ends the daemon has run out of patience: no more waiting for running requests."""


Event = Told | Beats | Apply | Measured | LeftoverGone | Passed | Woke | Close | Hasten


def step(fleet: Fleet, event: Event, now: float) -> tuple[Fleet, tuple[Effect, ...]]:
    """Return *fleet* after *event*, and what the world must do about it, in order."""
    turn = _Turn(fleet, now)
    match event:
        case Told(name, news):
            turn.tell(name, news)
        case Beats():
            for told in event.news:
                turn.tell(told.name, told.event)
        case Apply():
            turn.apply(event)
        case Measured(used, available):
            turn.fleet = replace(turn.fleet, available=available)
            for (name, launch), size in used.items():
                turn.tell(name, events.Measured(launch, size))
        case LeftoverGone(name):
            left = {other: pid for other, pid in fleet.leftovers.items() if other != name}
            turn.fleet = replace(fleet, leftovers=left)
        case Passed():
            turn.tell_all(events.Tick())
        case Woke(gap_s):
            turn.tell_all(events.Slept(gap_s))
        case Close():
            turn.fleet = replace(turn.fleet, closing=True)
            turn.tell_all(events.Stop())
        case Hasten():
            turn.tell_all(events.Hurry())
    turn.forget_removed()
    turn.share_out(anew=isinstance(event, Apply | Measured))
    turn.launch()
    return turn.fleet, tuple(turn.effects)


def wake_at(fleet: Fleet) -> float | None:
    """Return when *fleet* next needs `Passed`, or None."""
    return min(
        (at for server in fleet.servers.values() if (at := deadlines.wake_at(server)) is not None),
        default=None,
    )


def changed(before: Fleet, after: Fleet) -> tuple[str, ...]:
    """Return the servers that are not what they were, gone ones not included."""
    old = before.servers
    return tuple(name for name, server in after.servers.items() if old.get(name) is not server)


class Wakes:
    """`wake_at` for one fleet after another, each little different from the one before."""

    def __init__(self) -> None:
        self._at: dict[str, float | None] = {}

    def follow(self, fleet: Fleet, names: Iterable[str]) -> None:
        """Take in that *names* have changed in *fleet*."""
        for name in names:
            self._at[name] = deadlines.wake_at(fleet.servers[name])
        if len(self._at) != len(fleet.servers):
            self._at = {name: self._at[name] for name in fleet.servers}

    def next(self) -> float | None:
        """Return when the fleet next needs `Passed`, or None."""
        return min((at for at in self._at.values() if at is not None), default=None)


def sections(fleet: Fleet) -> frozenset[tuple[str, str]]:
    """Return name and spec hash of every section that a worker may be started from."""
    found = set()
    for server in fleet.servers.values():
        wanted = None if server.divergence is None else server.divergence.wanted
        for section in (server.section, server.previous, wanted):
            if section is not None:
                found.add((server.name, section.spec_hash))
    return frozenset(found)


def diverged(fleet: Fleet) -> Mapping[str, Divergence]:
    """Return the servers that run their previous section, in the order of the file."""
    return {it.name: it.divergence for it in fleet.servers.values() if it.divergence is not None}


def settled(fleet: Fleet) -> bool:
    """Whether no process is left; a closing daemon may end."""
    return all(server.worker is None for server in fleet.servers.values())


class _Turn:
    """One call of *step*: the fleet as it becomes, and the effects so far."""

    def __init__(self, fleet: Fleet, now: float) -> None:
        self.fleet = fleet
        self.now = now
        self.effects: list[Effect] = []
        self._moved = False

    def tell(self, name: str, event: events.Event) -> None:
        server = self.fleet.servers.get(name)
        if server is None:
            return
        after, effects = lifecycle.step(server, event, self.now)
        self._put(after)
        self.effects.extend(effects)
        self._moved = self._moved or room.moved(server, after)

    def tell_all(self, event: events.Event) -> None:
        for name in self.fleet.servers:
            self.tell(name, event)

    def apply(self, event: Apply) -> None:
        freed = frozenset(change.name for change in event.changes if isinstance(change, Remove))
        self.fleet = replace(
            self.fleet, max_parallel_loads=event.max_parallel_loads, budget=event.budget
        )
        for change in event.changes:
            match change:
                case Remove(name):
                    self.fleet = replace(self.fleet, removed=self.fleet.removed | {name})
                    self.tell(name, events.Stop())
                case Put():
                    self._put_entry(change, freed)
                case Adjust(name, spec, claim):
                    self.tell(name, events.Update(spec, claim))
        self._forget_given_away()

    def _forget_given_away(self) -> None:
        """Nobody goes back to a section whose address another server has now."""
        for server in self.fleet.servers.values():
            previous = server.previous
            if previous is not None and any(
                other.address == previous.address
                for other in self.fleet.servers.values()
                if other is not server
            ):
                self._put(replace(server, previous=None))

    def _put_entry(self, change: Put, freed: frozenset[str]) -> None:
        name = change.name
        if name not in self.fleet.servers:
            launches = self.fleet.launched.get(name, 0)
            new = Server(name, change.spec, change.spec_hash, since=self.now, launches=launches)
            self._put(new)
            self.fleet = replace(self.fleet, waits={**self.fleet.waits, name: freed})
        self._unremove({name})
        if change.desired is Desired.STOPPED:
            self.tell(name, events.Stop())
            self.tell(name, events.Replace(change.spec, change.spec_hash, change.claim))
            return
        self.tell(name, events.Replace(change.spec, change.spec_hash, change.claim))
        self.tell(name, events.Start())
        if change.blocked is not None:
            self.tell(name, events.Block(change.blocked))

    def forget_removed(self) -> None:
        if not self.fleet.removed:
            return
        servers = self.fleet.servers
        gone = {name for name in self.fleet.removed & servers.keys() if not servers[name].worker}
        if gone:
            left = {name: it for name, it in servers.items() if name not in gone}
            launched = {**self.fleet.launched, **{name: servers[name].launches for name in gone}}
            self.fleet = replace(self.fleet, servers=left, launched=launched)
            self._unremove(gone)

    def _unremove(self, names: Set[str]) -> None:
        """Count *names* as removed no more: they are gone, or back; nobody waits for them."""
        waits = {name: left for name, on in self.fleet.waits.items() if (left := on - names)}
        self.fleet = replace(self.fleet, removed=self.fleet.removed - names, waits=waits)

    def share_out(self, *, anew: bool) -> None:
        """Divide the memory again if it moved, and let servers try again that it kept from starting."""
        if not (anew or self._moved) or self.fleet.closing:
            return
        for name, share in room.new_shares(self.fleet.servers, self.fleet.budget).items():
            self.tell(name, events.Share(share))
        waiting = room.waiting(self.fleet.servers)
        kept_out = list(room.kept_out(self.fleet.servers))
        refused = self._refusals([*waiting, *kept_out])
        for server in kept_out:
            if server.name not in refused:
                self.tell(server.name, events.Unblock())

    def _refusals(self, asking: Sequence[Server]) -> dict[str, Cause]:
        fleet = self.fleet
        return room.refusals(asking, fleet.servers, fleet.budget, fleet.available)

    def launch(self) -> None:
        """Grant a launch to every server whose turn it is, and block those that find no memory."""
        waiting = room.waiting(self.fleet.servers)
        if self.fleet.closing or not waiting:
            return
        refused = self._refusals(waiting)
        for name, cause in refused.items():
            self.tell(name, events.Block(cause))
        set_aside = 0
        for server in waiting:
            if server.name in refused:
                continue
            if sum(map(_loads, self.fleet.servers.values())) >= self.fleet.max_parallel_loads:
                return
            servers, budget = self.fleet.servers, self.fleet.budget
            lacking = room.shortage(server, servers, budget, set_aside)
            if lacking is None and self._may_launch(server):
                share = room.first_share(server, servers, budget)
                self.tell(server.name, events.Grant(self._nonce(server), share))
            elif server.claim is not None:
                set_aside += server.claim.needs_bytes

    def _may_launch(self, server: Server) -> bool:
        if server.name in self.fleet.leftovers:
            return False
        waits = self.fleet.waits.get(server.name, frozenset())
        return not any(
            other.name in waits or other.worker.address == server.address
            for other in self.fleet.servers.values()
            if other.worker is not None
        )

    def _nonce(self, server: Server) -> str:
        text = f"{self.fleet.boot}\0{server.name}\0{server.launches + 1}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _put(self, server: Server) -> None:
        self.fleet = replace(self.fleet, servers={**self.fleet.servers, server.name: server})


def _loads(server: Server) -> bool:
    """Whether *server* is busy loading its model."""
    return server.worker is not None and server.state in (State.STARTING, State.LOADING)
