"""Judge an edit before it is applied, and turn its steps into changes of the fleet; all pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from daemon.config.diff import Live, Replace, Start, Step, Stop, diff
from daemon.config.prepare import PreparedServer
from daemon.supervisor.plan import Adjust, Fleet, Put, Remove, diverged
from daemon.supervisor.server import Address, Cause, Desired, State

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


def newly_blocked(servers: Sequence[PreparedServer], before: Servers) -> list[PreparedServer]:
    """Return those of *servers* that cannot start, and whose entry did not say the same before."""
    return [
        server
        for server in servers
        if server.blocked is not None
        and (server.name not in before or before[server.name].blocked != server.blocked)
    ]


def newly_addressed(servers: Sequence[PreparedServer], before: Servers) -> list[PreparedServer]:
    """Return those of *servers* that did not have their address before."""
    return [
        server
        for server in servers
        if server.name not in before or address(before[server.name]) != address(server)
    ]


def removes_much(steps: Sequence[Step], running: Collection[str]) -> bool:
    """Whether *steps* end all *running* servers, or more than half of many."""
    ended = {step.name for step in steps if isinstance(step, Stop)}.intersection(running)
    if not ended:
        return False
    return len(ended) == len(running) or (len(running) >= MANY and len(ended) * 2 > len(running))


def freed(found: Servers, fleet: Fleet) -> list[PreparedServer]:
    """Return those of *found* that are blocked no more, as far as their files can tell."""
    return [
        server
        for server in found.values()
        if server.blocked is None
        and server.name in fleet.servers
        and fleet.servers[server.name].state is State.BLOCKED
    ]


def address(server: PreparedServer) -> Address:
    """Return where *server* listens."""
    return Address(server.spec.host, server.spec.port)


def put(server: PreparedServer, desired: Desired) -> Put:
    """Return *server* as an entry of the fleet."""
    blocked = None if server.blocked is None else Cause(*server.blocked)
    return Put(server.name, server.spec, server.spec_hash, desired, blocked)


def _stepwise(steps: Sequence[Step], desired: DesiredOf) -> Iterator[Remove | Put | Adjust]:
    for step in steps:
        match step:
            case Stop(name, server=server):
                yield Remove(name) if server is None else put(server, Desired.STOPPED)
            case Replace(server) | Start(server):
                yield put(server, desired(server))
            case Live(server):
                yield Adjust(server.name, server.spec)


def _disabled(before: Servers, after: Servers) -> Iterator[Remove | Put]:
    """Yield the disabled entries that came or went: the plan knows no steps for them."""
    for name, server in before.items():
        if name not in after and not server.spec.enabled:
            yield Remove(name)
    for name, server in after.items():
        if name not in before and not server.spec.enabled:
            yield put(server, Desired.STOPPED)
