"""The dashboard: one HTML file, sent with a policy under which nothing but its own script can run."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("dashboard.html")
_BLOCK = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> bytes:
    """Return the page."""
    return _FILE.read_bytes()


@cache
def headers() -> dict[str, str]:
    """Return the headers of the page.

    Scripts and styles are allowed by their hashes, requests only to where the page came from; Trusted
    Types turn any attempt to make markup of data into an error.
    """
    blocks = _BLOCK.findall(page().decode())
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(blocks, "script"),
        "style-src": _hashes(blocks, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(blocks: list[tuple[str, str]], kind: str) -> str:
    digests = [hashlib.sha256(text.encode()).digest() for name, text in blocks if name == kind]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
