"""Who of a fleet may use how much memory: the plan of daemon.supervisor.memory on servers and their workers.

A worker holds its share, what its requests may still come to use, or what was measured of it, whichever
is most. Shares are divided among the workers that live and the servers that are to start. One that finds no room is blocked,
unless the room is only still to be given back: then it waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from daemon.policy.claim import Claim
from daemon.supervisor import memory
from daemon.supervisor.server import NO_MEMORY, Cause, Desired, Server, State, Worker
from daemon.units import format_size

Servers = Mapping[str, Server]

_SMALL_CHANGE = 2**20  # bytes; a share that could be more by less than this stays as it is


def moved(before: Server, after: Server) -> bool:
    """Return whether something changed that the division of memory depends on."""
    return _relevant(before) != _relevant(after)


def _relevant(server: Server) -> tuple[object, ...]:
    worker = server.worker
    held = worker and (worker.launch, worker.held_bytes, worker.ending, worker.claim)
    return server.state, server.desired, server.claim, held


def held(servers: Servers) -> dict[str, int]:
    """Return the bytes that nobody else can have, by server with a worker."""
    return {it.name: it.worker.held_bytes for it in servers.values() if it.worker is not None}


def kept_out(servers: Servers) -> Iterator[Server]:
    """Yield the servers that are blocked for want of memory."""
    for server in servers.values():
        if server.state is State.BLOCKED and server.cause and server.cause.code == NO_MEMORY:
            yield server


def new_shares(servers: Servers, budget: int | None) -> dict[str, int]:
    """Return the shares that change: lower ones at once, higher ones as far as there is room."""
    if budget is None:
        return {}
    targets = _targets(servers, budget)
    changed = {}
    free = budget - sum(held(servers).values())
    for name, worker, _ in _living(servers):
        target = targets[name]
        room = max(0, free) + max(0, worker.held_bytes - worker.share)
        if target < worker.share:
            changed[name] = target
        elif (more := min(target - worker.share, room)) >= _SMALL_CHANGE:
            changed[name] = worker.share + more
            free -= max(0, changed[name] - worker.held_bytes)
    return changed


def first_share(server: Server, servers: Servers, budget: int | None) -> int:
    """Return the share with which *server*, for which there is room, starts."""
    if budget is None or server.claim is None:
        return 0
    free = budget - sum(held(servers).values())
    return min(_targets(servers, budget).get(server.name, server.claim.needs_bytes), free)


def shortage(
    server: Server, servers: Servers, budget: int | None, set_aside: int = 0
) -> memory.Refusal | None:
    """Return what *server* lacks now, beside *set_aside* bytes, even if it will have it; None: nothing."""
    if budget is None or server.claim is None:
        return None
    return memory.admit(budget - set_aside, server.claim, held(servers))


def refusals(
    asking: Sequence[Server], servers: Servers, budget: int | None, available: int | None
) -> dict[str, Cause]:
    """Return which of *asking*, in their order, cannot start for want of memory, and why.

    *available* is what the machine could hand out: it counts where the last worker was killed from outside.
    """
    claims = {it.name: it.claim for it in asking if it.claim is not None}
    found = {}
    if budget is not None:
        no_room = memory.admit_in_turn(budget, claims.items(), _to_be_held(servers))
        for name, refusal in no_room.items():
            found[name] = Cause(NO_MEMORY, f"{refusal} ({memory.words(claims[name])})", memory.HINT)
    for server in asking:
        last, claim = server.last_exit, server.claim
        if last is None or last.classified != "killed_external" or claim is None:
            continue
        if available is not None and claim.needs_bytes > available:
            message = (
                f"its last worker was killed from outside, and of the {format_size(claim.needs_bytes)} that it needs"
                f" the machine has {format_size(available)} available"
            )
            hint = "close other programs; it starts by itself once the memory is there"
            found[server.name] = Cause(NO_MEMORY, message, hint)
    return found


def _to_be_held(servers: Servers) -> dict[str, int]:
    """Return what workers hold once they have given back what they were asked for, and ending ones have ended."""
    return {
        it.name: max(it.worker.share, it.worker.used)
        for it in servers.values()
        if it.worker is not None and it.worker.ending is None
    }


def _living(servers: Servers) -> Iterator[tuple[str, Worker, Claim]]:
    for server in servers.values():
        worker = server.worker
        if worker is not None and worker.ending is None and worker.claim is not None:
            yield server.name, worker, worker.claim


def _targets(servers: Servers, budget: int) -> dict[str, int]:
    """Return the share of every living worker, and of every server to start for which there is room."""
    claims = {name: claim for name, _, claim in _living(servers)}
    ending = sum(
        it.worker.held_bytes for it in servers.values() if it.worker and it.name not in claims
    )
    budget -= ending
    to_start = [(it.name, it.claim) for it in _to_start(servers) if it.claim is not None]
    refused = memory.admit_in_turn(
        budget, to_start, {name: claim.needs_bytes for name, claim in claims.items()}
    )
    claims |= {name: claim for name, claim in to_start if name not in refused}
    return memory.divide(budget, claims)


def _to_start(servers: Servers) -> Iterator[Server]:
    yield from waiting(servers)
    yield from (it for it in kept_out(servers) if it.desired is Desired.RUNNING)


def waiting(servers: Servers) -> list[Server]:
    """Return the servers that wait to be launched, the longest wait first."""
    return sorted((it for it in servers.values() if it.queued), key=lambda server: server.since)
