"""Who may talk to a worker: Host header, Origin and API key, decided from strings alone.

A page on the web can make a browser send requests to a server on the user's own machine. The Host check stops it
from reading answers by rebinding its name to 127.0.0.1; the Origin check stops it from using the server blindly.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

# Desktop applications and editors call from these; no web page can.
_APP_SCHEMES = frozenset({"app", "tauri", "vscode-webview", "vscode-file", "capacitor", "ionic"})
_ALLOWED_HEADERS = (
    "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta, "
    "anthropic-dangerous-direct-browser-access"
)


def host_allowed(host: str | None, allowed: Sequence[str]) -> bool:
    """Return whether a request with this Host header may be answered.

    Rebinding needs a name, so a literal address is always fine, and so is a client too old to send one.
    """
    if host is None or "*" in allowed or host.lower() in _lower(allowed):
        return True
    name = _hostname(host)
    if name is None:
        return False
    return _is_address(name) or _names_match(name, allowed)


def origin_allowed(origin: str, host: str | None, allowed: Sequence[str]) -> bool:
    """Return whether a browser page of *origin* may call; a page of this very *host* always may."""
    if "*" in allowed or origin.lower() in _lower(allowed):
        return True
    parts = _split(origin)
    if parts is None:
        return False
    if host is not None and parts.netloc.lower() == host.lower():
        return True
    if "localhost" in allowed and parts.scheme in _APP_SCHEMES:
        return True
    name = parts.hostname
    return name is not None and parts.scheme in ("http", "https") and _names_match(name, allowed)


def cors_headers(origin: str | None, host: str | None, allowed: Sequence[str]) -> Mapping[str, str]:
    """Return the headers that let a page of *origin* read a response, where it may."""
    if origin is None or not origin_allowed(origin, host, allowed):
        return {"Vary": "Origin"}
    return {
        "Vary": "Origin",
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": "x-request-id, retry-after",
    }


def preflight_headers(requested: str | None, *, private_network: bool) -> Mapping[str, str]:
    """Return the answer to a preflight; `*` would not cover Authorization, so the headers are named."""
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": requested or _ALLOWED_HEADERS,
        "Access-Control-Max-Age": "600",
    }
    return headers | ({"Access-Control-Allow-Private-Network": "true"} if private_network else {})


def key_accepted(authorization: str | None, x_api_key: str | None, key: str | None) -> bool:
    """Return whether the request carries *key*, in constant time; without a key every request is fine."""
    if key is None:
        return True
    scheme, _, bearer = (authorization or "").partition(" ")
    presented = [bearer.strip()] if scheme.lower() == "bearer" else []
    presented += [x_api_key] if x_api_key is not None else []
    matches = [
        hmac.compare_digest(value.encode("utf-8", "surrogateescape"), key.encode())
        for value in presented
    ]
    return any(matches)


def _names_match(name: str, allowed: Sequence[str]) -> bool:
    bare = name.lower().rstrip(".")
    if bare in _lower(allowed):
        return True
    loopback = bare == "localhost" or bare.endswith(".localhost") or _is_loopback(bare)
    return loopback and "localhost" in allowed


def _hostname(host: str) -> str | None:
    parts = _split(f"//{host}")
    return None if parts is None else parts.hostname


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for a port that is none
    except ValueError:
        return None
    return parts


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _lower(values: Sequence[str]) -> frozenset[str]:
    return frozenset(value.lower() for value in values)
