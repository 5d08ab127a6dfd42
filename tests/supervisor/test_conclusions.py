"""How what is on disk stands to what is in force, after each thing that can become of a reading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from daemon.config.diff import Stop
from daemon.errors import Problem
from daemon.supervisor.conclusions import ConfigStatus, Reloads

PROBLEM = Problem("servers.yaml", 1, 1, "", "broken")
WARNING = Problem("servers.yaml", 2, 1, "a", "old")
FRESH = ConfigStatus(Path("servers.yaml"))
RUNS = FRESH.applied("one", (WARNING,), 10.0)


def test_what_was_applied_is_in_force_and_counted() -> None:
    again = RUNS.refused((PROBLEM,)).applied("two", (), 20.0)
    assert (again.state, again.hash_on_disk, again.hash_applied) == ("applied", "two", "two")
    assert (again.applied_at, again.generation) == (20.0, 2)
    assert (again.problems, again.warnings) == ((), ())


def test_a_refused_file_leaves_what_is_in_force_alone() -> None:
    refused = RUNS.refused((PROBLEM,))
    assert refused == replace(RUNS, state="rejected", hash_on_disk=None, problems=(PROBLEM,))
    assert refused.unchanged("one") == RUNS


def test_a_daemon_that_runs_the_last_good_file_says_so_until_a_whole_one_comes() -> None:
    stale = RUNS.stale((PROBLEM,))
    assert (stale.state, stale.hash_on_disk, stale.problems) == ("stale", None, (PROBLEM,))
    assert stale.refused(()).state == "stale"
    assert stale.applied("two", (), 20.0).state == "applied"


def test_steps_that_wait_are_pending_and_none_is_nothing_new() -> None:
    steps = (Stop("a"),)
    assert (RUNS.waiting(steps).state, RUNS.waiting(steps).pending) == ("pending", steps)
    assert RUNS.waiting(()) == RUNS
    assert RUNS.waiting(steps).unchanged("one") == RUNS


def test_each_pass_is_counted_by_what_became_of_it() -> None:
    counted = RUNS.counted("applied", 1.0).counted("noop", 2.0).counted("rejected", 3.0)
    assert counted.reloads == Reloads(applied=1, rejected=1, noop=1, succeeded_at=2.0)
    assert FRESH.attempted(4.0).last_attempt_at == 4.0
