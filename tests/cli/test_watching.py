from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from daemon.cli.watching import watch, watch_json


class GoneError(Exception):
    pass


def document(state: str, **changes: Any) -> Any:
    server = {"name": "chat", "state": state, "reason": None, "pid": 7, "restarts": {"total": 0}}
    return {
        "now": "2026-01-31T08:00:00Z",
        "servers": [server | changes],
        "config": {"state": "applied"},
        "daemon": {"state": "running"},
    }


def watched(*documents: Any, terminal: bool) -> str:
    """Return what is printed while the daemon answers with *documents*, and then no more."""
    answers = iter(documents)

    def fetch() -> Any:
        for it in answers:
            return it
        raise GoneError

    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    pauses: list[float] = []
    with pytest.raises(GoneError):
        watch(fetch, lambda it: f"chat {it['servers'][0]['state']}", console, pauses.append)
    assert len(pauses) == len(documents)
    return out.getvalue()


def test_elsewhere_a_table_is_printed_only_when_something_has_changed() -> None:
    shown = watched(
        document("loading"),
        document("loading", age=3),
        document("ready"),
        document("ready", restarts={"total": 1}),
        terminal=False,
    )
    assert "\x1b" not in shown
    assert [line for line in shown.splitlines() if line.startswith("chat")] == [
        "chat loading",
        "chat ready",
        "chat ready",
    ]
    assert shown.count("2026-01-31T08:00:00Z") == 3


def test_on_a_terminal_each_table_takes_the_place_of_the_one_before_and_the_last_one_stays() -> (
    None
):
    shown = watched(document("loading"), document("ready"), terminal=True)
    assert shown.count("\x1b[2K") >= 1  # the line is cleared before it is written again
    assert shown.rindex("chat ready") > shown.rindex("chat loading")
    assert shown.endswith("\x1b[?25h")  # the cursor is back


def test_json_is_a_line_for_each_look(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([{"a": 1}, {"a": 2}])

    def fetch() -> object:
        for it in answers:
            return it
        raise GoneError

    with pytest.raises(GoneError):
        watch_json(fetch, lambda _: None)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"a": 1},
        {"a": 2},
    ]
