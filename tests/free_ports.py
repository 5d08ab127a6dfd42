"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket

# Under the ports that systems give to connections: between the choice and the server that is to have it, no
# connection can come by the port.
_PORTS = iter(random.sample(range(20_000, 32_000), 12_000))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody has and that was not returned before."""
    return next(port for port in _PORTS if is_free(port))


def is_free(port: int) -> bool:
    """Whether a server could be started on *port* of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
