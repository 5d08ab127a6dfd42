from __future__ import annotations

from collections.abc import Mapping

import pytest

from daemon.cli.events import line
from daemon.ops.events import EventJson, EventName

CHANGED = {
    "server": "chat", "from": "ready", "to": "backoff", "launch": 3, "pid": 42, "exit_code": 1,
    "reason": "exited with 1", "reason_code": "crashed", "hint": "see its log",
}  # fmt: skip
PROBLEM = {"file": "/s.yaml", "line": 3, "col": 5, "path": "servers.a", "message": "bad", "hint": "good"}  # fmt: skip


def event(name: EventName, data: Mapping[str, object]) -> EventJson:
    return {"id": "b-1", "seq": 1, "at": "2026-11-29T12:00:00.000Z", "event": name, "data": data}


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("server.added", {"server": "chat"}, ["chat: added"]),
        ("server.removed", {"server": "chat"}, ["chat: removed"]),
        (
            "server.changed",
            CHANGED,
            ["chat: ready → backoff (launch 3, pid 42)", "    exited with 1", "    hint: see its log"],
        ),
        (
            "config.reloaded",
            {"result": "rejected", "steps": [], "errors": [PROBLEM]},
            ["servers.yaml: rejected; what runs is unchanged", "    /s.yaml:3:5: servers.a: bad", "      hint: good"],
        ),
        (
            "config.reloaded",
            {"result": "rejected", "steps": [], "errors": [PROBLEM | {"line": 0, "col": 0, "path": ""}]},
            ["servers.yaml: rejected; what runs is unchanged", "    /s.yaml: bad", "      hint: good"],
        ),
        (
            "config.pending",
            {"steps": ["stop chat"]},
            ["servers.yaml: has changes that `tqd reload` applies", "    stop chat"],
        ),
        ("daemon.stopping", {}, ["daemon.stopping"]),
    ],
)  # fmt: skip
def test_an_event_reads_as_a_sentence_with_its_reason(
    name: EventName, data: Mapping[str, object], text: list[str]
) -> None:
    first, *rest = line(event(name, data)).splitlines()
    moment, _, sentence = first.partition("  ")
    assert moment.startswith("2026-11-")
    assert [sentence, *rest] == text
