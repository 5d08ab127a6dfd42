"""Go back to the section that served before, once, when a new one does not become ready; pure.

A worker of the new section that ends, or is ended because it does not move, before it was ready puts the
previous section back in force at once. Waiting for a turn, a port, memory or files is no failure. From
the moment the new section is ready the previous one is forgotten: what happens later is a crash like
any other. The next change of the entry, `tqd restart` or `tqd start` tries the file's section again.
"""

from __future__ import annotations

from dataclasses import replace

from daemon.supervisor.server import Cause, Divergence, Section, Server


def replaced(server: Server, section: Section) -> Server:
    """Return *server* with *section* in force, and with the one to go back to should that fail."""
    kept = server.section if _served(server) else server.previous
    previous = None if kept is None or kept.spec_hash == section.spec_hash else kept
    return replace(_under(server, section), previous=previous, divergence=None)


def retried(server: Server) -> Server:
    """Return *server* with the file's section in force again, if it was rolled back."""
    return server if server.divergence is None else replaced(server, server.divergence.wanted)


def proven(server: Server) -> Server:
    """Return *server* as it is once the section in force has become ready."""
    return replace(server, previous=None)


def rolled_back(server: Server, cause: Cause, now: float) -> Server | None:
    """Return *server* with its previous section in force because of *cause*; None when there is none."""
    previous = server.previous
    if previous is None:
        return None
    divergence = Divergence(server.section, cause, now)
    return replace(_under(server, previous), previous=None, divergence=divergence)


def _under(server: Server, section: Section) -> Server:
    return replace(server, spec=section.spec, spec_hash=section.spec_hash, claim=section.claim)


def _served(server: Server) -> bool:
    """Whether the section in force has been ready: in the worker of now, or before it was gone back to."""
    if server.divergence is not None:
        return True
    worker = server.worker
    if worker is None or worker.ready_at is None:
        return False
    return worker.spec_hash == server.spec_hash
