"""What an edit means, before anything is done about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.config.diff import Stop, diff
from daemon.config.prepare import Blocked, PreparedServer
from daemon.config.spec import ServerSpec
from daemon.policy.spec import KvRequest
from daemon.supervisor import edits
from daemon.supervisor.plan import Adjust, Fleet, Put, Remove
from daemon.supervisor.server import (
    Address,
    Cause,
    Desired,
    Divergence,
    Ending,
    Section,
    Server,
    State,
    Worker,
)

KV = KvRequest(
    policy="balanced", k="int8", v="turbo4", explicit=False, boundary_v=0, boundary_mode="int8",
    boundary_k="auto", sink_tokens=4, tail_tokens=32, strict=False,
)  # fmt: skip


def server(name: str, spec_hash: str = "1", **keys: object) -> PreparedServer:
    spec = ServerSpec.model_validate({"model": "m", "port": 8081} | keys)
    return PreparedServer(name, "m", spec, KV, spec_hash, spec_hash)


NOBODY = Fleet("boot")


def running(name: str, ending: Ending | None = None) -> Fleet:
    entry = server(name)
    worker = Worker(1, "nonce", "1", Address("127.0.0.1", 8081), 0.0, 0.0, ending=ending)
    return Fleet("boot", {name: Server(name, entry.spec, "1", state=State.READY, worker=worker)})


def table(*servers: PreparedServer) -> dict[str, PreparedServer]:
    return {it.name: it for it in servers}


def desired(it: PreparedServer) -> Desired:
    return Desired.RUNNING if it.spec.enabled and it.spec.autostart else Desired.STOPPED


def changes(before: edits.Servers, after: edits.Servers) -> tuple[object, ...]:
    return edits.changes(diff(before, after), before, after, desired)


def test_each_step_becomes_a_change_of_the_fleet() -> None:
    before = table(server("gone"), server("same"), server("new-worker"), server("live"))
    after = table(
        server("same"),
        server("new-worker", "2", port=8082),
        server("live", labels={"a": "b"}),
        server("new"),
    )
    assert changes(before, after) == (
        Remove("gone"),
        Put("new-worker", after["new-worker"].spec, "2", Desired.RUNNING),
        Put("new", after["new"].spec, "1", Desired.RUNNING),
        Adjust("live", after["live"].spec),
    )


def test_any_change_of_a_rolled_back_server_tries_it_again_with_a_new_worker() -> None:
    before, after = table(server("a")), table(server("a", labels={"x": "y"}))
    assert [str(it) for it in edits.steps(before, after, Fleet("boot"))] == [
        "live a: labels.x null → y"
    ]
    rolled_back = Fleet("boot", {"a": rolled_back_to(8081)})
    assert [str(it) for it in edits.steps(before, after, rolled_back)] == [
        "restart a: labels.x null → y"
    ]


def test_a_rolled_back_server_keeps_its_address_until_an_edit_names_it() -> None:
    fleet = Fleet("boot", {"a": rolled_back_to(9)})
    assert edits.kept_addresses((), fleet) == {Address("127.0.0.1", 9): "a"}
    assert edits.kept_addresses((Stop("a"),), fleet) == {}


def rolled_back_to(port: int) -> Server:
    wanted = Section(ServerSpec(model="m", port=8081), "new")
    divergence = Divergence(wanted, Cause("crashed", "why"), 0.0)
    return Server("a", ServerSpec(model="m", port=port), "old", divergence=divergence)


def test_a_disabled_entry_is_shown_but_not_run() -> None:
    on, off = server("a"), server("a", enabled=False)
    stopped = Put("a", off.spec, "1", Desired.STOPPED)
    assert changes({}, table(off)) == (stopped,)
    assert changes(table(on), table(off)) == (stopped,)
    assert changes(table(off), table(on)) == (Put("a", on.spec, "1", Desired.RUNNING),)
    assert changes(table(off), {}) == (Remove("a"),)


def test_what_the_user_stopped_is_not_started_by_an_edit() -> None:
    before, after = table(server("a")), table(server("a", "2", autostart=False))
    assert changes(before, after) == (Put("a", after["a"].spec, "2", Desired.STOPPED),)
    assert edits.to_run(diff(before, after), desired) == []


def test_a_server_that_cannot_start_says_why() -> None:
    missing = Blocked("model_missing", "no such folder", "pull it")
    blocked = replace(server("a"), blocked=missing)
    assert edits.put(blocked, Desired.RUNNING).blocked == Cause(
        "model_missing", "no such folder", "pull it"
    )


def test_an_edit_is_to_blame_only_for_what_it_blocks_itself() -> None:
    missing = Blocked("model_missing", "no such folder", None)
    free, blocked = server("a"), replace(server("a"), blocked=missing)
    assert edits.newly_blocked([blocked], table(free), NOBODY) == [blocked]
    assert edits.newly_blocked([blocked], {}, NOBODY) == [blocked]
    assert edits.newly_blocked([blocked], table(blocked), NOBODY) == []
    assert edits.newly_blocked([free], table(blocked), NOBODY) == []


def test_an_edit_never_ends_a_worker_that_no_other_could_follow() -> None:
    """Its model has gone since it started: it was blocked alike before the edit, and still runs."""
    blocked = replace(server("a"), blocked=Blocked("model_missing", "no such folder", None))
    assert edits.newly_blocked([blocked], table(blocked), running("a")) == [blocked]
    assert edits.unrepeatable(table(blocked), running("a")) == [blocked]
    assert edits.unrepeatable(table(blocked), running("a", ending="stop")) == []
    assert edits.unrepeatable(table(blocked), NOBODY) == []
    assert edits.unrepeatable(table(server("a")), running("a")) == []


def test_a_server_is_freed_when_its_files_are_back_whether_it_waits_or_was_read_without_them() -> (
    None
):
    found = table(server("a"))
    lacking = replace(server("a"), blocked=Blocked("model_missing", "no such folder", None))
    waiting = Server(
        "a", server("a").spec, "1", state=State.BLOCKED, cause=Cause("model_missing", "gone")
    )
    stopped = Fleet("boot", {"a": replace(waiting, state=State.STOPPED, cause=None)})
    assert edits.freed(found, table(lacking), NOBODY) == [server("a")]
    assert edits.freed(found, found, Fleet("boot", {"a": waiting})) == [server("a")]
    assert edits.freed(found, found, NOBODY) == []
    assert edits.freed(table(lacking), table(lacking), NOBODY) == []

    for fleet in (Fleet("boot", {"a": waiting}), stopped):
        assert edits.awakened([server("a")], fleet, desired) == (
            edits.put(server("a"), Desired.RUNNING),
        )
    assert edits.awakened([server("a")], running("a"), desired) == ()


def test_only_a_new_address_must_be_proven_free() -> None:
    here, there = server("a"), server("a", port=8082)
    assert edits.newly_addressed([there], table(here)) == [there]
    assert edits.newly_addressed([here], table(here)) == []
    assert edits.newly_addressed([here], {}) == [here]


@pytest.mark.parametrize(
    ("stops", "running", "much"),
    [
        ("a", "a", True),
        ("a", "ab", False),
        ("ab", "ab", True),
        ("ab", "abc", False),
        ("ab", "abcd", False),
        ("abc", "abcd", True),
        ("abc", "", False),
        ("x", "ab", False),
    ],
)
def test_an_edit_that_takes_away_too_much_is_suspect(stops: str, running: str, much: bool) -> None:
    assert edits.removes_much([Stop(name) for name in stops], set(running)) is much
