"""Which addresses of a configuration a stranger has: no worker could listen there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daemon.config.address import parse_endpoint
from daemon.config.spec import DaemonSpec, ServerSpec
from daemon.ops.document import Document
from daemon.supervisor.server import Address
from daemon.supervisor.sockets import AddressTakenError, try_out


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one configuration. *servers* are those whose address cannot be had, *endpoint* likewise.

    *ours* are held by the running daemon: the servers of one file share no port, so an edit that moves one
    server there moves the other away.
    """

    servers: Mapping[str, AddressTakenError]
    endpoint: AddressTakenError | None
    ours: tuple[int, ...]
    free: tuple[int, ...]


def look_at_ports(
    servers: Mapping[str, ServerSpec], daemon: DaemonSpec, running: Document | None
) -> Ports:
    """Try the address of every enabled server, and of the ops endpoint, without ever listening there.

    *running* is the status of the daemon whose workers are ours.
    """
    wanted: dict[str | None, Address] = {
        name: Address(spec.host, spec.port) for name, spec in servers.items() if spec.enabled
    }
    if daemon.status is not None:
        endpoint = parse_endpoint(daemon.status)
        wanted[None] = Address(endpoint.host, endpoint.port)
    held = _held_by(running)
    taken: dict[str | None, AddressTakenError] = {}
    free = []
    for name, address in wanted.items():
        if address.port in held:
            continue
        try:
            try_out(address)
        except AddressTakenError as error:
            taken[name] = error
        else:
            free.append(address.port)
    return Ports(
        {name: error for name, error in taken.items() if name is not None},
        taken.get(None),
        tuple(it.port for it in wanted.values() if it.port in held),
        tuple(free),
    )


def _held_by(daemon: Document | None) -> set[int]:
    """Return where the running daemon listens; a server that is stopped or failed holds nothing."""
    if daemon is None:
        return set()
    idle = ("stopped", "failed", "blocked")
    held = {it["endpoint"]["port"] for it in daemon["servers"] if it["state"] not in idle}
    if url := daemon["daemon"]["status_endpoint"]:
        held.add(parse_endpoint(url.removeprefix("http://")).port)
    return held
