"""The status document as it is sent: text, put together from a piece for each server.

A piece is kept until there is something else to tell of its server; only ages are filled in anew.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from datetime import datetime

from daemon.ops.server_status import Facts, facts, heartbeat_age_s, tell
from daemon.ops.status import frame
from daemon.ops.view import View

# No text can hold these: its quotes would be escaped.
_HEARTBEAT = '"heartbeat_age_s": '
_SAMPLED = '"sampled_at": '


@dataclass(frozen=True, slots=True)
class Written:
    """One answer; *etag* stays the same while nothing but ages has changed."""

    body: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class _Piece:
    known: Facts
    clock: datetime
    """When the supervisor's clock stood at zero."""
    before: str
    after: str
    """The text on both sides of the age of the heartbeat."""
    digest: str


class Writer:
    """Writes one view after another."""

    def __init__(self) -> None:
        self._pieces: dict[str, _Piece] = {}

    def write(self, view: View) -> Written:
        """Return the document about *view*."""
        clock = view.wall(0.0)
        self._pieces = {
            name: self._piece(view, facts(view, server), clock)
            for name, server in view.fleet.servers.items()
        }
        document = frame(view)
        head = json.dumps(document).removesuffix("]}")
        servers = ", ".join(_text(piece, view) for piece in self._pieces.values())
        document["now"], document["daemon"]["uptime_s"] = "", 0.0
        ageless = [json.dumps(document), *(it.digest for it in self._pieces.values())]
        digest = zlib.crc32("".join(ageless).encode())
        etag = f'W/"{view.config.generation}-{view.seq}-{digest:08x}"'
        return Written(f"{head}{servers}]}}".encode(), etag)

    def _piece(self, view: View, known: Facts, clock: datetime) -> _Piece:
        kept = self._pieces.get(known.server.name)
        if kept is not None and kept.known == known and kept.clock == clock:
            return kept
        status = tell(known, view)
        status["health"]["heartbeat_age_s"] = None
        before, after = json.dumps(status).split(f"{_HEARTBEAT}null")
        ageless = before + after.rpartition(_SAMPLED)[0]
        return _Piece(known, clock, before, after, f"{zlib.crc32(ageless.encode()):08x}")


def _text(piece: _Piece, view: View) -> str:
    age_s = heartbeat_age_s(piece.known.server, view.now)
    return f"{piece.before}{_HEARTBEAT}{'null' if age_s is None else age_s}{piece.after}"
