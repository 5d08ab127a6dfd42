"""What `tqd status` prints below and around its table."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from rich.console import Console, RenderableType

from daemon.cli.status_table import detail, overview
from daemon.cli.tables import ratio
from daemon.errors import UnknownServerError
from daemon.ops.document import Document, ServerStatus

NOW = "2027-01-15T08:16:40+00:00"


def server(state: str, **more: object) -> ServerStatus:
    plain: dict[str, Any] = {
        "name": "chat", "state": state, "state_since": NOW, "reason": "why", "hint": None, "pid": None,
        "load_progress": None, "last_exit": None, "restarts": {"total": 0}, "requests": None, "kv": None,
        "endpoint": {"url": "http://127.0.0.1:8081"}, "desired": "running", "desired_source": "cli",
        "model": None, "model_requested": "m", "load_s": None, "memory": None, "throughput": None,
        "log_path": "chat.log", "log_dropped_bytes": 0, "layers": None,
    }  # fmt: skip
    return cast("ServerStatus", plain | more)


def document(*servers: ServerStatus, **config: object) -> Document:
    plain: dict[str, Any] = {
        "path": "servers.yaml", "state": "applied", "errors": [], "pending": [], "divergent": [],
        "warnings": [],
    }  # fmt: skip
    found = {
        "now": NOW,
        "servers": list(servers),
        "memory": None,
        "config": plain | config,
        "daemon": {"status_endpoint_error": None, "state": "running"},
    }
    return cast("Document", found)


def shown(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(what)
    return out.getvalue()


def test_a_refused_file_says_what_makes_the_daemon_read_it_again() -> None:
    error = {
        "file": "servers.yaml",
        "line": 9,
        "col": 13,
        "path": "a",
        "message": "no",
        "hint": "b",
    }
    text = shown(overview(document(state="rejected", errors=[error])))
    assert "hint: it is read again when it is saved, or with `tqd reload`" in text
    assert "  servers.yaml:9:13: a: no\n    hint: b" in text


def test_a_warning_about_the_file_in_force_is_shown() -> None:
    text = shown(overview(document(warnings=["servers.yaml:3:4: servers.a.model: gone"])))
    assert "\nnote: servers.yaml:3:4: servers.a.model: gone\n" in text


def test_a_machine_that_is_short_of_memory_is_said_to_be() -> None:
    memory = {
        "planned_bytes": 1, "budget_bytes": 2, "total_bytes": 3, "device": "cpu", "over_budget": False,
    }  # fmt: skip
    for pressure, said in (("normal", False), (None, False), ("warn", True), ("critical", True)):
        with_pressure = {**document(), "memory": memory | {"pressure": pressure}}
        text = shown(overview(cast("Document", with_pressure)))
        assert (f"the machine is short of memory ({pressure})" in text) is said


def test_a_problem_of_the_whole_file_has_no_line() -> None:
    error = {"file": "servers.yaml", "line": 0, "col": 0, "path": "", "message": "no", "hint": None}
    assert "  servers.yaml: no\n" in shown(overview(document(state="rejected", errors=[error])))


def test_one_server_shows_the_hint_that_all_of_them_show() -> None:
    blocked = server("blocked", hint="do")
    assert "chat is blocked: why\n  hint: do" in shown(overview(document(blocked)))
    assert "chat is blocked: why\n  hint: do" in shown(detail(blocked, document(blocked)))


def test_a_server_without_a_hint_points_to_its_log() -> None:
    text = shown(overview(document(server("backoff"))))
    assert "hint: `tqd logs chat` shows what it wrote" in text


@pytest.mark.parametrize(
    ("compression", "said"),
    [(2.56, "2.56x smaller than"), (1.0, "as large as"), (0.5, "2.00x larger than")],
)
def test_a_ratio_never_calls_larger_smaller(compression: float, said: str) -> None:
    assert ratio(compression) == said


def test_a_name_that_only_the_refused_file_holds_is_told_apart_from_a_typing_error() -> None:
    assert UnknownServerError.among(["a", "b"], "c", "applied").hint == "one of a, b"
    hint = UnknownServerError.among(["a"], "c", "rejected").hint
    assert hint is not None
    assert "not in force (rejected): `tqd status` says why" in hint


def test_each_run_of_layers_shows_what_attends_what_packs_and_why() -> None:
    kv: dict[str, Any] = {
        "summary": "turbo8v4 on all layers", "bytes_per_token": 100.0, "compression": None,
        "calibration": "none", "warnings": ["the metal kernels fail; the reference runs instead"],
    }  # fmt: skip
    layers = [
        {
            "first": 0, "last": 3, "kind": "full", "requested": "turbo8v4", "effective": "turbo8v4", "reason": None,
            "backend": "reference", "backend_reason": "no", "packing_backend": "metal", "packing_reason": None,
        }
    ]  # fmt: skip
    chat = server("ready", kv=kv, layers=layers)

    text = shown(detail(chat, document(chat)))

    assert "note: the metal kernels fail; the reference runs instead" in text
    head, row = text.splitlines()[-2:]
    assert head.split() == [
        "LAYERS", "KIND", "REQUESTED", "EFFECTIVE", "ATTENTION", "PACKING", "REASON",
    ]  # fmt: skip
    assert row.split() == ["0-3", "full", "turbo8v4", "turbo8v4", "reference", "metal", "no"]
