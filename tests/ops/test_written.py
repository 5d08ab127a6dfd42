from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from daemon.config.machine import HostMemory
from daemon.ops import written
from daemon.ops.server_status import tell
from daemon.ops.status import document
from daemon.ops.view import View
from daemon.ops.written import Writer
from daemon.supervisor.gauge import Reading
from daemon.supervisor.server import Cause, State
from tests.ops.conftest import READY


def chat(view: View, **changes: object) -> View:
    server = replace(view.fleet.servers["chat"], **changes)  # type: ignore[arg-type]
    return replace(view, fleet=replace(view.fleet, servers={**view.fleet.servers, "chat": server}))


def reported(view: View, **changes: object) -> View:
    return replace(view, reports={"chat": replace(view.reports["chat"], **changes)})  # type: ignore[arg-type]


def beat(view: View) -> View:
    worker = view.fleet.servers["chat"].worker
    assert worker is not None
    return chat(view, worker=replace(worker, moved_at=view.now - 0.25, generation=9))


CHANGES: dict[str, Callable[[View], View]] = {
    "time": lambda view: replace(view, now=view.now + 1.5),
    "clock": lambda view: replace(view, wall=lambda at: view.wall(at) + timedelta(hours=1)),
    "beat": beat,
    "state": lambda view: chat(view, state=State.DEGRADED, cause=Cause("stalled", "why")),
    "worker is gone": lambda view: chat(view, worker=None, state=State.STOPPED),
    "queued": lambda view: chat(view, worker=None, state=State.STARTING),
    "report": lambda view: reported(view, ready=READY.model_copy(update={"load_s": 1.0})),
    "sample": lambda view: reported(view, sampled_at=999.75),
    "report is gone": lambda view: replace(view, reports={}),
    "policy": lambda view: replace(view, prepared={}),
    "footprint": lambda view: replace(
        view, reading=Reading(HostMemory(64, 30, 5), {("chat", 7): 1234})
    ),
    "desired source": lambda view: replace(view, desired_source=lambda name: "cli"),
    "log folder": lambda view: replace(view, log_path=lambda name: Path(f"/other/{name}.log")),
    "lost output": lambda view: replace(view, log_bytes_dropped=lambda name: 7),
    "fewer servers": lambda view: replace(view, fleet=replace(view.fleet, servers={})),
    "event": lambda view: replace(view, seq=13),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_kept_is_never_what_was_before(view: View, change: Callable[[View], View]) -> None:
    writer, later = Writer(), change(view)
    for shown in (view, later, view):
        assert writer.write(shown).body.decode() == json.dumps(document(shown))


def test_a_text_that_looks_like_an_age_stays_as_it_is(view: View) -> None:
    text = '"heartbeat_age_s": null, "sampled_at": null'
    shown = chat(view, cause=Cause("stalled", text))
    assert Writer().write(shown).body.decode() == json.dumps(document(shown))


def test_only_ages_keep_the_etag(view: View) -> None:
    writer, later = Writer(), reported(beat(replace(view, now=view.now + 9)), sampled_at=1008.0)
    etag = writer.write(view).etag
    assert writer.write(later).etag == etag
    changes = [it for name, it in CHANGES.items() if name not in ("time", "beat", "sample")]
    assert etag not in [writer.write(change(view)).etag for change in changes]


def test_a_server_is_told_again_only_when_there_is_something_to_tell(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def counted(known: written.Facts, view: View) -> object:
        told.append(known.server.name)
        return tell(known, view)

    monkeypatch.setattr(written, "tell", counted)
    writer = Writer()
    writer.write(view)
    writer.write(replace(view, now=view.now + 60, seq=99))
    assert told == [*view.fleet.servers]
    writer.write(beat(view))
    assert told[len(view.fleet.servers) :] == ["chat"]
