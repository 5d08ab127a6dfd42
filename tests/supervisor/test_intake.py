"""When the file is read, and what becomes of it: every path through the step function."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from daemon.config.diff import diff
from daemon.config.prepare import Blocked, Prepared, PreparedServer
from daemon.config.spec import DaemonSpec, ServerSpec
from daemon.errors import Problem
from daemon.supervisor import events, intake, plan
from daemon.supervisor.intake import (
    Apply,
    Asked,
    Compare,
    Compared,
    Doubt,
    Facts,
    Intake,
    Keep,
    Looked,
    Nudged,
    Read,
    Reading,
    Refuse,
    Show,
)
from daemon.supervisor.plan import Fleet, Put, Told
from daemon.supervisor.server import Desired
from tests.supervisor import configurations
from tests.supervisor.configurations import PATH, loaded, prepared

BROKEN = Problem("servers.yaml", 1, 1, "", "broken")


def server(name: str, version: str = "1", **keys: object) -> PreparedServer:
    blocked = keys.pop("blocked", None)
    spec = ServerSpec.model_validate({"model": "m", "port": 8081} | keys)
    return configurations.server(name, spec, version, blocked)


ONE = prepared(server("a"), content="one")
TWO = prepared(server("a"), server("b", port=8082), content="two")
NOTHING = prepared(content="nothing")
REMOVES_MUCH = Doubt("it removes much")
APPLY_TWO = Apply(loaded(TWO), TWO, diff(ONE.servers, TWO.servers))
APPLY_NOTHING = Apply(loaded(NOTHING), NOTHING, diff(ONE.servers, {}))


@dataclass
class Desk:
    """Drives an intake by hand: a file with an identity, and a clock."""

    applied: Prepared = ONE
    mode: str = "auto"
    now: float = 0.0
    file: int = 0
    running: tuple[str, ...] = ()
    intake: Intake = field(default_factory=lambda: Intake({PATH: look(0)[PATH]}))

    def tell(self, event: intake.Event) -> tuple[intake.Effect, ...]:
        self.intake, effects = intake.step(self.intake, event, self.facts(), self.now)
        return effects

    def look(self) -> tuple[intake.Effect, ...]:
        self.now = max(self.now, self.intake.look_at)
        return self.tell(Looked(look(self.file)))

    def read(self, result: Prepared | Problem | None) -> tuple[intake.Effect, ...]:
        return self.tell(intake.Arrived(self.reading(result)))

    def reading(self, result: Prepared | Problem | None) -> Reading:
        seen = look(self.file)
        match result:
            case Problem():
                return Reading(seen, problems=(result,))
            case None:
                return Reading(seen, loaded=loaded(self.applied))
            case _:
                return Reading(seen, loaded=loaded(result), prepared=result)

    def facts(self) -> Facts:
        applied = prepared(
            *self.applied.servers.values(),
            content=self.applied.content_hash,
            daemon=DaemonSpec.model_validate({"reload": self.mode}),
            ends_open=self.applied.ends_open,
        )
        return Facts(applied, fleet(self.running), lambda _: Desired.RUNNING)


def look(identity: int) -> intake.Look:
    return {PATH: (0, 0, identity, 0)}


def fleet(running: tuple[str, ...]) -> Fleet:
    found = Fleet("boot", max_parallel_loads=9)
    for port, name in enumerate(running, 8081):
        put = Put(name, ServerSpec(model="m", port=port), "1", Desired.RUNNING)
        found, _ = plan.step(found, plan.Apply((put,), 9), 0.0)
        found, _ = plan.step(found, Told(name, events.Spawned(1, 100)), 0.0)
    return found


def test_a_file_is_read_when_two_looks_agree_that_it_has_changed() -> None:
    desk = Desk()
    assert desk.look() == ()
    desk.file = 1
    assert desk.look() == ()
    desk.file = 2  # still being written
    assert desk.look() == ()
    assert desk.look() == (Read(),)
    assert desk.read(TWO) == (APPLY_TWO,)
    assert desk.look() == ()


def test_the_second_look_keeps_its_distance_however_busy_the_folder_is() -> None:
    desk = Desk(file=1)
    desk.look()
    due = desk.intake.look_at
    desk.tell(Nudged())
    assert desk.intake.look_at == due == desk.now + intake.SETTLE_S


def test_a_nudge_makes_the_next_look_come_sooner_but_not_at_once_again() -> None:
    desk = Desk()
    desk.look()
    desk.tell(Nudged())
    assert desk.intake.look_at == desk.now + intake.LEAST_S
    desk.now += 0.5
    desk.tell(Nudged())
    assert desk.intake.look_at <= desk.now


def test_a_change_that_was_taken_back_before_it_came_to_rest_is_none() -> None:
    desk = Desk(file=1)
    desk.look()
    desk.file = 0
    assert desk.look() == ()
    assert desk.look() == ()


def test_a_refused_file_is_read_again_only_when_it_changes() -> None:
    desk = Desk(file=1)
    desk.look(), desk.look()
    assert desk.read(BROKEN) == (Refuse((BROKEN,)),)
    assert desk.look() == ()
    desk.file = 2
    desk.look()
    assert desk.look() == (Read(),)


def test_what_is_in_force_already_is_kept() -> None:
    desk = Desk()
    assert desk.tell(Asked()) == (Read(),)
    assert desk.read(None) == (Keep(loaded(ONE)),)


def test_a_file_that_is_written_again_while_it_is_read_is_read_when_it_rests() -> None:
    """Found by the simulation: a second save that began right after the first had come to rest."""
    desk = Desk(file=1)
    desk.look()
    assert desk.look() == (Read(),)
    half = prepared(content="half")
    torn = replace(desk.reading(half), still=False)
    assert desk.tell(intake.Arrived(torn)) == ()

    desk.file = 2
    desk.look()
    assert desk.look() == (Read(),)
    desk.file = 3
    assert desk.read(half) == ()  # begun with another file than the one that was at rest
    desk.look()
    assert desk.look() == (Read(),)
    assert desk.read(TWO) == (APPLY_TWO,)


def test_a_reading_that_was_asked_for_does_not_wait_for_rest() -> None:
    desk = Desk(file=1)
    desk.tell(Asked())
    torn = replace(desk.reading(TWO), still=False)
    assert desk.tell(intake.Arrived(torn)) == (APPLY_TWO,)


def test_requests_during_a_reading_become_one_more_reading() -> None:
    desk = Desk()
    assert desk.tell(Asked()) == (Read(),)
    assert desk.tell(Asked()) == ()
    assert desk.tell(Asked()) == ()
    assert desk.read(TWO) == (APPLY_TWO, Read())
    assert desk.read(None) == (Keep(loaded(ONE)),)


def test_a_look_during_a_reading_decides_nothing() -> None:
    desk = Desk()
    desk.tell(Asked())
    desk.file = 1
    assert desk.look() == ()
    desk.file = 0
    desk.read(TWO)
    desk.file = 1
    desk.look()
    assert desk.look() == (Read(),)


def test_an_edit_that_removes_everything_is_applied_when_no_newer_file_comes() -> None:
    desk = Desk(running=("a",))
    desk.tell(Asked())
    assert desk.read(NOTHING) == (REMOVES_MUCH,)
    effects: tuple[intake.Effect, ...] = ()
    while not effects:
        effects = desk.look()
    assert effects == (APPLY_NOTHING,)
    assert desk.now == intake.CONFIRM_S


def test_a_server_between_two_restarts_counts_as_running() -> None:
    """Found by the simulation: a worker crashed just when half of a file was read."""
    desk = Desk(running=("a",))
    crashed, _ = plan.step(fleet(("a",)), Told("a", events.Exited(1, 1)), 0.0)
    facts = replace(desk.facts(), fleet=crashed)
    reading, _ = intake.step(desk.intake, Asked(), facts, 0.0)
    _, effects = intake.step(reading, intake.Arrived(desk.reading(NOTHING)), facts, 0.0)
    assert effects == (REMOVES_MUCH,)


def test_a_server_that_is_on_its_way_out_does_not_count_as_running() -> None:
    """Found by the simulation: one that the edit before had removed still drained."""
    desk = Desk(running=("a", "gone"))
    leaving, _ = plan.step(fleet(("a", "gone")), plan.Apply((plan.Remove("gone"),), 1), 0.0)
    facts = replace(desk.facts(), fleet=leaving)
    reading, _ = intake.step(desk.intake, Asked(), facts, 0.0)
    _, effects = intake.step(reading, intake.Arrived(desk.reading(NOTHING)), facts, 0.0)
    assert effects == (REMOVES_MUCH,)


def test_an_edit_that_removes_every_entry_is_doubted_even_if_none_runs() -> None:
    """Found by the simulation: the user's `tqd stop` was forgotten with the entries."""
    desk = Desk()
    desk.tell(Asked())
    assert desk.read(NOTHING) == (REMOVES_MUCH,)


@pytest.mark.parametrize(
    "cut",
    [
        prepared(server("a", "2", port=808), content="cut in a number", ends_open=True),
        prepared(server("a"), server("b", port=80), content="cut in a new one", ends_open=True),
    ],
    ids=lambda it: it.content_hash,
)
def test_an_edit_that_ends_in_the_middle_of_a_line_waits_for_the_rest(cut: Prepared) -> None:
    desk = Desk(running=("a",))
    desk.tell(Asked())
    assert desk.read(cut) == (Doubt("its last line has no end"),)
    desk.file = 1
    desk.look()
    assert desk.look() == (Read(),)
    assert desk.read(TWO) == (APPLY_TWO,)


def test_whoever_never_ends_the_last_line_is_taken_at_their_word() -> None:
    desk = Desk(applied=replace(ONE, ends_open=True), running=("a",))
    desk.tell(Asked())
    edit = replace(TWO, ends_open=True)
    assert desk.read(edit) == (Apply(loaded(edit), edit, APPLY_TWO.steps),)


def test_an_end_that_is_lost_without_a_change_is_no_edit_to_doubt() -> None:
    desk = Desk(running=("a",))
    desk.tell(Asked())
    same = replace(ONE, content_hash="no newline", ends_open=True)
    assert desk.read(same) == (Apply(loaded(same), same, ()),)


@pytest.mark.parametrize("mode", ["auto", "manual"])
def test_a_newer_file_takes_the_place_of_one_that_removes_much(mode: str) -> None:
    desk = Desk(running=("a",), mode=mode)
    desk.tell(Asked())
    desk.read(NOTHING)
    desk.file = 1
    desk.look()
    assert desk.look() == (Read(),)
    assert desk.read(TWO) == (APPLY_TWO,)


def test_requests_wait_for_the_end_of_a_doubt() -> None:
    desk = Desk(running=("a",))
    desk.tell(Asked())
    desk.read(NOTHING)
    assert desk.tell(Asked()) == ()
    desk.now = intake.CONFIRM_S
    assert desk.look() == (APPLY_NOTHING, Read())


def test_a_server_that_could_not_start_refuses_the_edit_with_its_place() -> None:
    missing = Blocked("model_missing", "no such folder", "pull it")
    edit = prepared(server("a", "2", blocked=missing), content="two")
    desk = Desk()
    desk.tell(Asked())
    [refusal] = desk.read(edit)
    assert isinstance(refusal, Refuse)
    [problem] = refusal.problems
    assert (problem.path, problem.message) == ("servers.a.model", "no such folder")
    assert problem.hint is not None
    assert problem.hint.startswith("pull it; or write `enabled: false` for this server")


def test_the_way_out_for_a_server_that_runs_is_never_to_stop_it() -> None:
    missing = Blocked("file_missing", "the file is not there", None, "python")
    edit = prepared(server("a", "2", blocked=missing), content="two")
    desk = Desk(running=("a",))
    desk.tell(Asked())
    [refusal] = desk.read(edit)
    assert isinstance(refusal, Refuse)
    [problem] = refusal.problems
    assert problem.path == "servers.a.python"
    assert problem.hint is not None
    assert problem.hint.startswith("take the change of this server back")


def test_a_change_that_needs_another_daemon_refuses_the_whole_edit() -> None:
    edit = prepared(server("b"), daemon=DaemonSpec(status="127.0.0.1:9"))
    desk = Desk()
    desk.tell(Asked())
    [refusal] = desk.read(edit)
    assert isinstance(refusal, Refuse)
    assert "needs a daemon restart" in refusal.problems[0].message


def test_manual_reload_compares_and_applies_nothing_until_it_is_asked() -> None:
    desk = Desk(mode="manual", file=1)
    desk.look()
    assert desk.look() == (Compare(),)
    [shown] = desk.tell(Compared(desk.reading(TWO)))
    assert isinstance(shown, Show)
    assert [str(it) for it in shown.steps] == ["start b"]
    assert desk.tell(Compared(desk.reading(None))) == (Show(()),)
    assert desk.tell(Compared(desk.reading(BROKEN))) == (Refuse((BROKEN,)),)
    assert desk.tell(Asked()) == (Read(),)


def test_a_daemon_whose_reload_is_off_reads_nothing() -> None:
    desk = Desk(mode="off", file=1)
    assert [desk.look() for _ in range(4)] == [()] * 4


def test_a_daemon_that_is_shutting_down_applies_nothing_any_more() -> None:
    """Found by the simulation: half of a file became the last good one, because nothing ran any more."""
    desk = Desk(file=1, running=("a",))
    closing, _ = plan.step(fleet(("a",)), plan.Close(), 0.0)
    facts = replace(desk.facts(), fleet=closing)
    desk.tell(Asked())
    _, effects = intake.step(desk.intake, intake.Arrived(desk.reading(TWO)), facts, 0.0)
    assert isinstance(effects[0], Refuse)

    fresh = Desk(file=1).intake
    for _ in range(3):
        fresh, effects = intake.step(fresh, Looked(look(1)), facts, fresh.look_at)
        assert effects == ()
