"""A new section that does not become ready: what goes back, what does not, and when it is tried again."""

from __future__ import annotations

import pytest

from daemon.config.spec import ProbeSpec, RestartSpec, ServerSpec
from daemon.supervisor import events, exits, plan
from daemon.supervisor.events import (
    Beat,
    Exited,
    Garbled,
    Hello,
    Ready,
    Restart,
    SendLive,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    Stop,
)
from daemon.supervisor.plan import Adjust, Fleet, Put, Remove, Told
from daemon.supervisor.server import Cause, Desired, Server, State


def spec(port: int = 1, **keys: object) -> ServerSpec:
    return ServerSpec(
        model="m",
        port=port,
        restart=RestartSpec(max=2, window=100.0, backoff=(1.0, 4.0), stable_after=50.0),
        probe=ProbeSpec(interval=1.0, stall=10.0, load_stall=20.0),
        drain_timeout=5.0,
        stop_grace=7.0,
    ).model_copy(update=keys)


def put(version: str, port: int = 1, name: str = "a", **keys: object) -> Put:
    return Put(name, spec(port, **keys), version, Desired.RUNNING)


class Bench:
    """A fleet in which one server has been ready with section ``old``."""

    def __init__(self) -> None:
        self.fleet = Fleet("boot")
        self.now = 0.0
        self.effects: list[events.Effect] = []
        self.apply(put("old"))
        self.load()
        self.effects.clear()

    def do(self, event: plan.Event) -> None:
        self.fleet, effects = plan.step(self.fleet, event, self.now)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Spawn):
                self.do(Told(effect.name, Spawned(effect.launch, 100 + effect.launch)))

    def apply(self, *changes: Put | Remove | Adjust) -> None:
        self.do(plan.Apply(changes, 4))

    def tell(self, event: events.Event, name: str = "a") -> None:
        self.do(Told(name, event))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(plan.Passed())

    def load(self, name: str = "a") -> None:
        worker = self.server(name).worker
        assert worker is not None
        self.tell(Hello(worker.launch, worker.nonce, 1), name)
        self.tell(Ready(worker.launch, worker.nonce, worker.spec_hash), name)

    def exit(self, code: int = 1, name: str = "a", fatal: str | None = None) -> None:
        self.tell(Exited(self.server(name).launches, code, fatal=fatal), name)

    def edit(self, version: str = "new", port: int = 1) -> None:
        """Apply an edit of the server and let its old worker drain."""
        self.apply(put(version, port))
        self.exit(0)

    def server(self, name: str = "a") -> Server:
        return self.fleet.servers[name]

    def in_force(self) -> tuple[str, State]:
        return self.server().spec_hash, self.server().state


@pytest.fixture
def bench() -> Bench:
    return Bench()


def crashes(bench: Bench) -> None:
    bench.exit(1)


def is_refused_by_its_worker(bench: Bench) -> None:
    bench.exit(78, fatal="unsupported head_dim")


def does_not_find_its_model(bench: Bench) -> None:
    bench.exit(66)


def is_killed_from_outside(bench: Bench) -> None:
    bench.exit(-9)


def ends_without_an_error(bench: Bench) -> None:
    bench.exit(0)


def says_nothing(bench: Bench) -> None:
    bench.pass_time(exits.SPAWN_TIMEOUT_S)
    bench.exit(-15)


def hangs(bench: Bench) -> None:
    worker = bench.server().worker
    assert worker is not None
    bench.tell(Hello(worker.launch, worker.nonce, 1))
    bench.pass_time(20.0)
    bench.exit(-15)


def talks_nonsense(bench: Bench) -> None:
    bench.tell(Garbled(bench.server().launches, "x"))
    bench.exit(-15)


def cannot_be_spawned(bench: Bench) -> None:
    launch = bench.server().launches
    bench.tell(SpawnFailed(launch, Cause("spawn_failed", "no such interpreter")))


@pytest.mark.parametrize(
    "load",
    [
        crashes,
        is_refused_by_its_worker,
        does_not_find_its_model,
        is_killed_from_outside,
        ends_without_an_error,
        says_nothing,
        hangs,
        talks_nonsense,
        cannot_be_spawned,
    ],
)
def test_a_new_section_whose_load_fails_goes_back_to_the_one_that_served(
    bench: Bench, load: object
) -> None:
    bench.edit("new", port=2)
    load(bench)  # type: ignore[operator]
    assert bench.in_force() == ("old", State.STARTING)
    assert bench.server().address.port == 1
    divergence = bench.server().divergence
    assert divergence is not None
    assert (divergence.wanted.spec_hash, divergence.wanted.address.port) == ("new", 2)

    bench.load()
    assert bench.in_force() == ("old", State.READY)
    assert plan.diverged(bench.fleet) == {"a": divergence}
    assert bench.server().restarts_total == 1


def test_the_reason_is_what_the_worker_said(bench: Bench) -> None:
    bench.edit()
    is_refused_by_its_worker(bench)
    divergence = bench.server().divergence
    assert divergence is not None
    assert (divergence.cause.code, divergence.cause.message) == (
        "bad_config",
        "unsupported head_dim",
    )


def test_it_goes_back_once_and_the_old_section_then_has_its_own_backoff(bench: Bench) -> None:
    bench.edit()
    crashes(bench)
    crashes(bench)
    assert bench.in_force() == ("old", State.BACKOFF)
    assert bench.server().divergence is not None


def test_a_crash_after_the_new_section_was_ready_goes_nowhere_back(bench: Bench) -> None:
    bench.edit()
    bench.load()
    crashes(bench)
    assert bench.in_force() == ("new", State.BACKOFF)


def test_a_server_that_never_served_has_nothing_to_go_back_to() -> None:
    bench = Bench()
    bench.apply(put("first", 9, "b"))
    bench.exit(1, "b")
    bench.apply(put("second", 9, "b"))
    bench.exit(1, "b")
    assert bench.server("b").divergence is None
    assert bench.server("b").state is State.BACKOFF


def test_edits_in_a_row_go_back_to_the_one_that_served(bench: Bench) -> None:
    bench.apply(put("second"))
    bench.apply(put("third"))
    bench.exit(0)
    crashes(bench)
    assert bench.in_force() == ("old", State.STARTING)


def test_an_edit_back_to_what_served_is_no_divergence(bench: Bench) -> None:
    bench.apply(put("new"))
    bench.apply(put("old"))
    bench.exit(0)
    crashes(bench)
    assert bench.in_force() == ("old", State.BACKOFF)
    assert plan.diverged(bench.fleet) == {}


def diverged() -> Bench:
    bench = Bench()
    bench.edit()
    crashes(bench)
    bench.load()
    bench.effects.clear()
    return bench


def another_edit(bench: Bench) -> None:
    bench.apply(put("newer"))


def a_live_edit(bench: Bench) -> None:
    bench.apply(put("new", labels={"team": "x"}))


def a_restart(bench: Bench) -> None:
    bench.tell(Restart())


@pytest.mark.parametrize("way", [another_edit, a_live_edit, a_restart])
def test_the_next_edit_or_a_restart_tries_the_files_section_and_can_go_back_again(
    way: object,
) -> None:
    bench = diverged()
    way(bench)  # type: ignore[operator]
    assert plan.diverged(bench.fleet) == {}
    bench.exit(0)
    assert bench.server().spec_hash.startswith("new")

    crashes(bench)
    assert bench.in_force() == ("old", State.STARTING)


def test_a_start_of_a_stopped_server_tries_the_files_section() -> None:
    bench = diverged()
    bench.tell(Stop())
    bench.exit(0)
    bench.tell(Start())
    bench.load()
    assert bench.in_force() == ("new", State.READY)


def test_a_crash_of_what_runs_instead_tries_nothing_new() -> None:
    bench = diverged()
    bench.tell(Beat(bench.server().launches, 1))
    crashes(bench)
    bench.pass_time(5.0)
    bench.load()
    assert bench.in_force() == ("old", State.READY)
    assert "a" in plan.diverged(bench.fleet)


def test_an_edit_back_to_what_runs_restarts_nothing_and_is_sent_live() -> None:
    bench = diverged()
    bench.apply(put("old", aliases=("best",)))
    assert bench.effects == [SendLive("a", bench.server().launches)]
    assert plan.diverged(bench.fleet) == {}


def test_an_edit_of_another_server_leaves_it_alone() -> None:
    bench = diverged()
    bench.apply(put("first", 9, "b"))
    assert "a" in plan.diverged(bench.fleet)
    assert bench.in_force() == ("old", State.READY)


def test_nobody_goes_back_to_an_address_that_another_server_has_now(bench: Bench) -> None:
    bench.apply(put("new", 2), put("first", 1, "b"))
    bench.exit(0)
    crashes(bench)
    assert bench.in_force() == ("new", State.BACKOFF)


def test_every_section_that_may_run_is_kept() -> None:
    bench = diverged()
    assert plan.sections(bench.fleet) == {("a", "old"), ("a", "new")}


def test_launch_numbers_go_on_from_an_earlier_daemon_and_over_a_removal() -> None:
    bench = Bench()
    bench.fleet = Fleet("boot", launched={"a": 41})
    bench.apply(put("old"))
    assert bench.server().launches == 42
    bench.apply(Remove("a"))
    bench.exit(0)
    assert "a" not in bench.fleet.servers
    bench.apply(put("old"))
    assert bench.server().launches == 43
