from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from daemon.cli.waiting import failure, outcome, wait
from daemon.errors import InProgressError, TqdError
from daemon.ops.document import ServerStatus
from daemon.supervisor.client import Client
from daemon.supervisor.messages import Action


def server(state: str, launch: int = 1, **more: object) -> ServerStatus:
    plain: dict[str, Any] = {
        "name": "chat", "state": state, "launch": launch, "reason": None, "hint": None,
        "last_exit": None, "load_progress": None,
    }  # fmt: skip
    return cast("ServerStatus", plain | more)


@pytest.mark.parametrize(
    ("action", "state", "launch", "expected"),
    [
        ("start", "ready", 1, "done"),
        ("start", "loading", 1, "waiting"),
        ("start", "backoff", 1, "waiting"),
        ("start", "failed", 1, "failed"),
        ("start", "blocked", 1, "failed"),
        ("start", "stopped", 1, "failed"),
        ("restart", "ready", 1, "waiting"),
        ("restart", "ready", 2, "done"),
        ("restart", "draining", 1, "waiting"),
        ("stop", "draining", 1, "waiting"),
        ("stop", "stopped", 1, "done"),
    ],
)
def test_each_state_means_done_failed_or_wait(
    action: Action, state: str, launch: int, expected: str
) -> None:
    assert outcome(action, server(state, launch), 1) == expected


def test_a_server_that_left_the_file_has_been_stopped() -> None:
    assert outcome("stop", None, 1) == "done"
    assert outcome("start", None, 1) == "failed"


class Several(Client):
    """A daemon whose servers are in other states at each look."""

    def __init__(self, *looks: Sequence[ServerStatus]) -> None:
        self._looks = list(looks)

    def status(self) -> Any:
        found = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        return {"servers": found, "config": {"divergent": []}}


def test_a_failure_is_told_once_no_other_server_is_on_its_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocked = server("blocked", name="code", reason="there is no such folder", hint="name another")
    client = Several([blocked, server("loading")], [blocked, server("ready")])
    with pytest.raises(TqdError, match=r"^code is blocked: there is no such folder") as error:
        wait(client, "start", {"code": 0, "chat": 0}, 10)
    assert error.value.hint == "name another"
    assert capsys.readouterr().err == "code blocked, chat loading\n"


def test_a_failure_is_told_when_the_time_is_up_for_another() -> None:
    blocked = server("blocked", name="code")
    with pytest.raises(TqdError, match="code is blocked; chat is still loading") as error:
        wait(Several([blocked, server("loading")]), "start", {"code": 0, "chat": 0}, 0)
    assert error.value.exit_code == 1


class Script(Client):
    """A daemon whose server goes through the given states, one for each look."""

    def __init__(
        self, *servers: ServerStatus | None, divergent: Sequence[dict[str, object]] = ()
    ) -> None:
        self._servers = list(servers)
        self.divergent = divergent

    def status(self) -> Any:
        found = self._servers.pop(0) if len(self._servers) > 1 else self._servers[0]
        return {
            "servers": [] if found is None else [found],
            "config": {"divergent": self.divergent},
        }


def test_a_failure_ends_the_wait_with_its_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    last = {"code": 1, "tail": ["RuntimeError: no"]}
    failed = server("failed", reason="exited with 1", last_exit=last)
    with pytest.raises(TqdError, match="chat is failed: exited with 1") as error:
        wait(Script(server("loading"), failed), "start", {"chat": 0}, 10)
    assert "RuntimeError: no" in error.value.message
    assert error.value.hint == "`tqd logs chat` shows all it wrote"
    assert capsys.readouterr().err == "chat loading\n"


def test_a_server_that_leaves_the_file_meanwhile_ends_the_wait() -> None:
    with pytest.raises(TqdError, match="chat is no longer in"):
        wait(Script(server("loading"), None), "start", {"chat": 0}, 10)


def test_the_time_is_up_while_it_still_goes_on() -> None:
    with pytest.raises(InProgressError, match="chat is loading") as error:
        wait(Script(server("loading")), "start", {"chat": 0}, 0)
    assert error.value.exit_code == 5


ROLLED_BACK = {"server": "chat", "reason": "exited with 1", "hint": None}


def test_a_server_that_went_back_to_its_previous_section_is_no_success() -> None:
    with pytest.raises(TqdError, match=r"previous section.*: exited with 1") as error:
        wait(Script(server("ready", 3), divergent=[ROLLED_BACK]), "restart", {"chat": 1}, 10)
    assert "`tqd restart chat`" in str(error.value.hint)


def test_a_start_of_what_runs_rolled_back_already_is_done() -> None:
    wait(Script(server("ready", 1), divergent=[ROLLED_BACK]), "start", {"chat": 1}, 10)


def test_a_server_that_will_be_tried_again_shows_its_last_lines_too() -> None:
    last = {"code": 1, "tail": ["RuntimeError: no"]}
    assert failure(server("backoff", last_exit=last)) == "chat is backoff\n  RuntimeError: no"


def test_a_signal_is_told_as_one() -> None:
    last = {"code": -9, "tail": []}
    assert failure(server("failed", last_exit=last)).endswith(
        "(the last worker ended with signal 9)"
    )


def test_a_workers_json_lines_are_opened_up_and_other_lines_kept() -> None:
    logged = '{"event": "engine.failed", "level": "error", "timestamp": "now", "code": 70, "exception": "Traceback\\nboom"}'
    last = {"code": 70, "tail": [logged, "plain", '{"no": "event"}', "7"]}

    lines = failure(server("failed", last_exit=last)).splitlines()[1:]

    assert lines == [
        "  now error engine.failed code=70", "    Traceback", "    boom", "  plain", '  {"no": "event"}', "  7",
    ]  # fmt: skip
