"""Judge an edit before it is applied, and turn its steps into changes of the fleet; all pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from daemon.config.diff import Live, Replace, Start, Step, Stop, diff
from daemon.config.prepare import PreparedServer
from daemon.supervisor.memory import Refusal, admit_in_turn
from daemon.supervisor.plan import Adjust, Fleet, Put, Remove, diverged
from daemon.supervisor.room import kept_out
from daemon.supervisor.server import NO_MEMORY, Address, Cause, Desired, Server, State

MANY = 4  # of this many running servers, an edit that takes away more than half is suspect

Servers = Mapping[str, PreparedServer]
DesiredOf = Callable[[PreparedServer], Desired]


def steps(before: Servers, after: Servers, fleet: Fleet) -> tuple[Step, ...]:
    """Return the steps from *before* to *after*, as they are for *fleet*.

    Any change of the entry of a server that was rolled back tries that entry again, with a new worker.
    """
    rolled_back = diverged(fleet)
    return tuple(
        Replace(step.server, step.changes)
        if isinstance(step, Live) and step.name in rolled_back
        else step
        for step in diff(before, after)
    )


def kept_addresses(steps: Sequence[Step], fleet: Fleet) -> Mapping[Address, str]:
    """Return the addresses that rolled back servers keep through *steps*, whatever the file says."""
    touched = {step.name for step in steps}
    return {fleet.servers[name].address: name for name in diverged(fleet) if name not in touched}


def changes(
    steps: Sequence[Step], before: Servers, after: Servers, desired: DesiredOf
) -> tuple[Remove | Put | Adjust, ...]:
    """Return what *steps* mean for the fleet, disabled entries included, which are shown but not run."""
    return (*_stepwise(steps, desired), *_disabled(before, after))


def to_run(steps: Sequence[Step], desired: DesiredOf) -> list[PreparedServer]:
    """Return the servers that get a new worker by *steps*."""
    servers = [step.server for step in steps if isinstance(step, Replace | Start)]
    return [server for server in servers if desired(server) is Desired.RUNNING]


def newly_blocked(
    starting: Sequence[PreparedServer], before: Servers, fleet: Fleet
) -> list[PreparedServer]:
    """Return those of *starting* that cannot start, and run now or were not blocked alike before."""
    return [
        server
        for server in starting
        if server.blocked is not None
        and (
            server.name not in before
            or before[server.name].blocked != server.blocked
            or runs(server.name, fleet)
        )
    ]


def unrepeatable(servers: Servers, fleet: Fleet) -> list[PreparedServer]:
    """Return those of *servers* that run, and could not start again: a file has gone since."""
    return [
        it
        for it in servers.values()
        if it.spec.enabled and it.blocked is not None and runs(it.name, fleet)
    ]


def runs(name: str, fleet: Fleet) -> bool:
    """Whether server *name* has a worker that is not on its way out."""
    server = fleet.servers.get(name)
    return server is not None and server.worker is not None and server.worker.ending is None


def newly_addressed(servers: Sequence[PreparedServer], before: Servers) -> list[PreparedServer]:
    """Return those of *servers* that did not have their address before."""
    return [
        server
        for server in servers
        if server.name not in before or address(before[server.name]) != address(server)
    ]


def unfit(
    starting: Sequence[PreparedServer],
    steps: Sequence[Step],
    before: Servers,
    fleet: Mapping[str, Server],
    budget_bytes: int,
) -> dict[str, Refusal]:
    """Return which servers would have no room for what they need, and did not lack it before.

    Asked are those that get a new worker by *steps*, and running ones that need more than before; the
    others count with what they need or are seen to use, those that *steps* end not at all.
    """
    growing = [
        step.server for step in steps if isinstance(step, Live) and _grows(step.server, before)
    ]
    newcomers = {it.name: it.claim for it in (*starting, *growing) if it.claim is not None}
    ended = {step.name for step in steps if isinstance(step, Stop)}
    held = {
        name: max(worker.claim.needs_bytes if worker.claim else 0, worker.used)
        for name, server in fleet.items()
        if (worker := server.worker) is not None and name not in ended | newcomers.keys()
    }
    lacking = {server.name for server in kept_out(fleet)}
    refused = admit_in_turn(budget_bytes, newcomers.items(), held)
    return {name: refusal for name, refusal in refused.items() if name not in lacking}


def _grows(server: PreparedServer, before: Servers) -> bool:
    was, now = before[server.name].claim, server.claim
    return was is not None and now is not None and now.needs_bytes > was.needs_bytes


def removes_much(steps: Sequence[Step], running: Collection[str]) -> bool:
    """Whether *steps* end all *running* servers, or more than half of many."""
    ended = {step.name for step in steps if isinstance(step, Stop)}.intersection(running)
    if not ended:
        return False
    return len(ended) == len(running) or (len(running) >= MANY and len(ended) * 2 > len(running))


def freed(found: Servers, before: Servers, fleet: Fleet) -> list[PreparedServer]:
    """Return those of *found* that are blocked no more, as far as their files can tell, and were before."""
    lacking = {name for name, it in before.items() if it.blocked is not None}
    return [
        it
        for it in found.values()
        if it.blocked is None and (it.name in lacking or waits_for_files(it.name, fleet))
    ]


def awakened(freed: Sequence[PreparedServer], fleet: Fleet, desired: DesiredOf) -> tuple[Put, ...]:
    """Return what *freed* change in the fleet: who runs, or waits for a turn, has its section already."""
    return tuple(
        put(it, desired(it))
        for it in freed
        if waits_for_files(it.name, fleet) or fleet.servers[it.name].state is State.STOPPED
    )


def waits_for_files(name: str, fleet: Fleet) -> bool:
    """Whether server *name* is blocked for another reason than memory, which somebody else watches."""
    server = fleet.servers.get(name)
    if server is None or server.state is not State.BLOCKED or server.cause is None:
        return False
    return server.cause.code != NO_MEMORY


def address(server: PreparedServer) -> Address:
    """Return where *server* listens."""
    return Address(server.spec.host, server.spec.port)


def put(server: PreparedServer, desired: Desired) -> Put:
    """Return *server* as an entry of the fleet."""
    return Put(server.name, server.spec, server.spec_hash, desired, cause(server), server.claim)


def cause(server: PreparedServer) -> Cause | None:
    """Return why *server* cannot start, as its state tells it."""
    blocked = server.blocked
    return blocked and Cause(blocked.code, blocked.message, blocked.hint)


def _stepwise(steps: Sequence[Step], desired: DesiredOf) -> Iterator[Remove | Put | Adjust]:
    for step in steps:
        match step:
            case Stop(name, server=server):
                yield Remove(name) if server is None else put(server, Desired.STOPPED)
            case Replace(server) | Start(server):
                yield put(server, desired(server))
            case Live(server):
                yield Adjust(server.name, server.spec, server.claim)


def _disabled(before: Servers, after: Servers) -> Iterator[Remove | Put]:
    """Yield the disabled entries that came or went: the plan knows no steps for them."""
    for name, server in before.items():
        if name not in after and not server.spec.enabled:
            yield Remove(name)
    for name, server in after.items():
        if name not in before and not server.spec.enabled:
            yield put(server, Desired.STOPPED)
