"""Hosts and ports as servers.yaml writes them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_ENDPOINT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")

EVERY_ADDRESS = "*"
LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port to listen on."""

    host: str
    port: int


def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint that ``host:port`` or ``[ipv6]:port`` means.

    Raises:
        ValueError: *text* is neither.
    """
    match = _ENDPOINT.fullmatch(text)
    if match is not None and 1 <= int(match["port"]) <= 65535:
        host = match["v6"] or match["host"]
        if is_host(host) and (":" in host) is (match["v6"] is not None):
            return Endpoint(host, int(match["port"]))
    raise ValueError("expected host:port, such as 127.0.0.1:8700")


def is_host(text: str) -> bool:
    """Return whether *text* is an IP address or could be a host name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        # all digits and dots is an address with a typing error, not a name
        looks_numeric = text.replace(".", "").isdigit()
        return len(text) <= 253 and not looks_numeric and _HOST_NAME.fullmatch(text) is not None
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach *host*."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def bind_group(host: str) -> str:
    """Return a name shared by the spellings of one address; two of a group cannot share a port.

    ``localhost`` may be 127.0.0.1 or ::1, so the three count as one although a kernel would bind both.
    `EVERY_ADDRESS` clashes with every group.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return LOOPBACK if host.lower() == "localhost" else host.lower()
    if address.is_unspecified:
        return EVERY_ADDRESS
    return LOOPBACK if str(address) in ("127.0.0.1", "::1") else str(address)
