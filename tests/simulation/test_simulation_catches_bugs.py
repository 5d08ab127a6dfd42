"""The simulation would notice: bugs put into the core on purpose are caught within a few histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from daemon.supervisor import (
    deadlines,
    edits,
    ending,
    intake,
    lifecycle,
    listeners,
    moves,
    plan,
    rollback,
    room,
)
from daemon.supervisor.server import Server, State
from tests.simulation.history import run
from tests.simulation.world import BrokenError

SEEDS = 200

Patch = Callable[[pytest.MonkeyPatch], None]


def launches_beside_a_left_over(patch: pytest.MonkeyPatch) -> None:
    may_launch = plan._Turn._may_launch

    def forgetful(turn: Any, server: Server) -> bool:
        fleet = turn.fleet
        turn.fleet = replace(fleet, leftovers={})
        try:
            return may_launch(turn, server)
        finally:
            turn.fleet = fleet

    patch.setattr(plan._Turn, "_may_launch", forgetful)


def shares_an_address(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        plan._Turn,
        "_may_launch",
        lambda turn, server: server.name not in turn.fleet.leftovers,
    )


def restarts_without_end(patch: pytest.MonkeyPatch) -> None:
    back_off = ending._back_off
    patch.setattr(
        ending,
        "_back_off",
        lambda server, *rest: back_off(replace(server, restarts=()), *rest),
    )


def restarts_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ending, "_back_off", lambda server, cause, jitter, now: (
        moves.queue(server, now)
    ))  # fmt: skip


def kills_without_grace(patch: pytest.MonkeyPatch) -> None:
    signal_term = ending.signal_term

    def impatient(server: Server, worker: Any, now: float) -> Any:
        server, effects = signal_term(server, worker, now)
        assert server.worker is not None
        return replace(server, worker=replace(server.worker, deadline=now)), effects

    patch.setattr(ending, "signal_term", impatient)


def takes_sleep_for_a_stall(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deadlines, "slept", lambda server, gap_s: server)


def forgets_a_removed_server_whose_worker_drains(patch: pytest.MonkeyPatch) -> None:
    def forget(turn: Any) -> None:
        fleet = turn.fleet
        left = {name: it for name, it in fleet.servers.items() if name not in fleet.removed}
        turn.fleet = replace(fleet, servers=left, removed=frozenset())

    patch.setattr(plan._Turn, "forget_removed", forget)


def loses_a_server_that_comes_back(patch: pytest.MonkeyPatch) -> None:
    unremove = plan._Turn._unremove

    def forgetful(turn: Any, names: Any) -> None:
        if not any(it in turn.fleet.servers for it in names):
            unremove(turn, names)

    patch.setattr(plan._Turn, "_unremove", forgetful)


def runs_what_the_user_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "_stop", lambda server, now: lifecycle._restart(server, now))


def waits_for_a_left_over_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan.LeftoverGone, "name", "", raising=False)
    step = plan.step
    patch.setattr(
        plan,
        "step",
        lambda fleet, event, now: step(
            fleet, plan.Passed() if isinstance(event, plan.LeftoverGone) else event, now
        ),
    )


def reads_without_waiting_for_rest(patch: pytest.MonkeyPatch) -> None:
    looked = intake._looked

    def hasty(state: Any, look: Any, facts: Any, now: float) -> Any:
        return looked(replace(state, moving=look), look, facts, now)

    patch.setattr(intake, "_looked", hasty)


def trusts_a_file_that_moved_while_it_was_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "_has_moved", lambda state, reading: False)


def believes_an_empty_file(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "_removes_much", lambda edit, facts: False)


def never_looks_again_after_a_refusal(patch: pytest.MonkeyPatch) -> None:
    step = intake.step

    def sulking(state: Any, event: Any, facts: Any, now: float) -> Any:
        state, effects = step(state, event, facts, now)
        if any(isinstance(it, intake.Refuse) for it in effects):
            state = replace(state, reading=True)
        return state, effects

    patch.setattr(intake, "step", sulking)


def swings_between_two_sections(patch: pytest.MonkeyPatch) -> None:
    rolled_back = rollback.rolled_back

    def forgetful(server: Server, cause: Any, now: float) -> Server | None:
        back = rolled_back(server, cause, now)
        return None if back is None else replace(back, previous=server.section)

    patch.setattr(rollback, "rolled_back", forgetful)


def forgets_who_is_next(patch: pytest.MonkeyPatch) -> None:
    launch = plan._Turn.launch

    def once(turn: Any) -> None:
        queued = [it for it in turn.fleet.servers.values() if it.queued]
        if len(queued) < 3:
            launch(turn)

    patch.setattr(plan._Turn, "launch", once)


def keeps_the_sockets_of_the_stopped(patch: pytest.MonkeyPatch) -> None:
    wanted = listeners.listeners

    def greedy(fleet: plan.Fleet) -> Any:
        stopped = [it for it in fleet.servers.values() if it.state is State.STOPPED]
        return {
            **wanted(fleet),
            **{it.address: listeners.Listener(it.address, it.name) for it in stopped},
        }

    patch.setattr(listeners, "listeners", greedy)


def keeps_a_live_change_to_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "_update", lambda server, spec: (replace(server, spec=spec), ()))


def gives_memory_away_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(room, "shortage", lambda *_: None)
    patch.setattr(room, "refusals", lambda *_: {})
    patch.setattr(edits, "unfit", lambda *_: {})
    patch.setattr(room, "first_share", lambda server, *_: server.claim.needs_bytes)


def numbers_launches_anew(patch: pytest.MonkeyPatch) -> None:
    step = plan.step
    patch.setattr(
        plan,
        "step",
        lambda fleet, event, now: step(replace(fleet, launched={}), event, now),
    )


BUGS: list[Patch] = [
    launches_beside_a_left_over,
    shares_an_address,
    restarts_without_end,
    restarts_at_once,
    kills_without_grace,
    takes_sleep_for_a_stall,
    forgets_a_removed_server_whose_worker_drains,
    loses_a_server_that_comes_back,
    runs_what_the_user_stopped,
    waits_for_a_left_over_for_ever,
    reads_without_waiting_for_rest,
    trusts_a_file_that_moved_while_it_was_read,
    believes_an_empty_file,
    never_looks_again_after_a_refusal,
    swings_between_two_sections,
    forgets_who_is_next,
    keeps_the_sockets_of_the_stopped,
    keeps_a_live_change_to_itself,
    gives_memory_away_twice,
    numbers_launches_anew,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.timeout(600)
def test_a_core_that(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(BrokenError):
        _live(SEEDS)


def _live(histories: int) -> None:
    for seed in range(histories):
        run(seed)
