"""Which sockets the supervisor must hold open for a fleet: pure, like the plan that it follows from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import Address, Desired, Server, State


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that must be open; *away* is the server for which the supervisor answers 503."""

    address: Address
    owner: str
    away: Server | None = None


def listeners(fleet: Fleet) -> Mapping[Address, Listener]:
    """Return every socket that the supervisor must hold, by address.

    A worker's address stays open as long as the worker lives, and the address of a server that is
    to have a worker is open already: nobody else can take it, and no connection is refused. It is
    closed while a server is stopped, blocked or failed.
    """
    found = {it.address: it for it in _worker_listeners(fleet)}
    for server in fleet.servers.values():
        if server.name in fleet.leftovers:
            continue  # it may still listen there
        to_come = server.desired is Desired.RUNNING and not fleet.closing
        waiting = server.worker is not None or server.state in (State.STARTING, State.BACKOFF)
        if to_come and waiting and server.address not in found:
            found[server.address] = Listener(server.address, server.name, away=server)
    return found


def same_listeners(before: Fleet, after: Fleet, changed: Sequence[str]) -> bool:
    """Whether `listeners` must be the same for both; quick, for the many turns that change no address."""
    if before.leftovers is not after.leftovers or before.closing is not after.closing:
        return False
    if before.servers.keys() != after.servers.keys():
        return False
    return all(_listens_alike(before.servers[name], after.servers[name]) for name in changed)


def _listens_alike(before: Server, after: Server) -> bool:
    old, new = before.worker, after.worker
    if old is None or new is None:
        return False
    return (
        old.address == new.address
        and before.address == after.address
        and before.desired is after.desired
    )


def _worker_listeners(fleet: Fleet) -> Iterator[Listener]:
    for server in fleet.servers.values():
        if server.worker is not None:
            yield Listener(server.worker.address, server.name)
