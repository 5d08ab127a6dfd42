"""One server's decisions: every transition that a user can meet, then every state times every event."""

from __future__ import annotations

import pytest

from daemon.config.spec import ProbeSpec, RestartSpec, ServerSpec
from daemon.supervisor import events, exits, moves
from daemon.supervisor.deadlines import wake_at
from daemon.supervisor.events import (
    Beat,
    Block,
    Exited,
    Garbled,
    Grant,
    Hello,
    Hurry,
    Measured,
    Progress,
    Ready,
    Replace,
    Restart,
    SendDrain,
    SendLive,
    SendSignal,
    Share,
    Slept,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    Stop,
    Tick,
    Unblock,
    Update,
)
from daemon.supervisor.lifecycle import step
from daemon.supervisor.server import Cause, Desired, Server, State

SPEC = ServerSpec(
    model="m",
    port=8081,
    restart=RestartSpec(max=2, window=100.0, backoff=(1.0, 4.0), stable_after=50.0),
    probe=ProbeSpec(interval=1.0, stall=10.0, load_stall=20.0),
    drain_timeout=5.0,
    stop_grace=7.0,
)
IN_USE = Cause("port_in_use", "port 8081 is in use by pid 7 (x)")


class Machine:
    """Drives one server by hand and keeps what it asked for."""

    def __init__(self, spec: ServerSpec = SPEC) -> None:
        self.server = Server("chat", spec, "hash-1")
        self.now = 100.0
        self.effects: list[events.Effect] = []

    def __call__(self, *events: events.Event, after: float = 0.0) -> Machine:
        self.now += after
        for event in events:
            self.server, effects = step(self.server, event, self.now)
            self.effects.extend(effects)
        return self

    def to(self, state: State) -> Machine:
        """Bring a fresh server to *state* by the shortest way."""
        launch = self.server.launches + 1
        spawn = (Start(), Grant("n"), Spawned(launch, 40))
        load = (*spawn, Hello(launch, "n", 1))
        ready = (*load, Ready(launch, "n", self.server.spec_hash))
        ways: dict[State, tuple[events.Event, ...]] = {
            State.STOPPED: (),
            State.BLOCKED: (Start(), Block(IN_USE)),
            State.STARTING: spawn,
            State.LOADING: load,
            State.READY: ready,
            State.DEGRADED: ready,
            State.DRAINING: (*ready, Stop()),
            State.STOPPING: (*load, Stop()),
            State.BACKOFF: (*spawn, Exited(launch, 1)),
            State.FAILED: (*spawn, Exited(launch, 78)),
        }
        self(*ways[state])
        if state is State.DEGRADED:
            self(Tick(), after=SPEC.probe.stall)
        assert self.server.state is state
        self.effects.clear()
        return self

    @property
    def state(self) -> State:
        return self.server.state

    @property
    def launch(self) -> int:
        return self.server.launches

    def due(self) -> float:
        at = wake_at(self.server)
        assert at is not None
        return at - self.now


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_start_waits_for_its_turn_and_then_spawns(machine: Machine) -> None:
    machine(Start())
    assert (machine.state, machine.server.queued, machine.effects) == (State.STARTING, True, [])

    machine(Grant("n1"))
    assert machine.effects == [Spawn("chat", 1, "n1")]


def test_hello_then_ready_with_the_right_nonce_and_hash_is_ready(machine: Machine) -> None:
    machine(Start(), Grant("n1"), Spawned(1, 40), Hello(1, "n1", 1))
    assert machine.state is State.LOADING

    machine(Progress(1, "weights", 0.5))
    assert machine.server.worker is not None
    assert machine.server.worker.fraction == 0.5

    machine(Ready(1, "n1", "hash-1"))
    assert machine.state is State.READY


@pytest.mark.parametrize(
    "lie",
    [
        Hello(1, "other", 1),
        Hello(1, "n1", 99),
        Ready(1, "n1", "hash-1"),
        Garbled(1, "not JSON"),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_ended_and_the_server_failed(
    machine: Machine, lie: events.Event
) -> None:
    machine(Start(), Grant("n1"), Spawned(1, 40), lie)
    assert machine.state is State.STOPPING
    assert machine.effects[-1] == SendSignal("chat", 1, "TERM")

    machine(Exited(1, 0))
    assert machine.state is State.FAILED
    assert machine.server.cause is not None
    assert machine.server.cause.code == "protocol"


@pytest.mark.parametrize("lie", [Ready(1, "other", "hash-1"), Ready(1, "n", "hash-2")])
def test_ready_for_another_launch_or_spec_is_not_ready(lie: Ready) -> None:
    machine = Machine().to(State.LOADING)

    machine(lie)

    assert machine.state is State.STOPPING


def test_news_of_an_earlier_launch_changes_nothing(machine: Machine) -> None:
    machine.to(State.BACKOFF)(Start(), Grant("n2"), Spawned(2, 41), Hello(2, "n2", 1))
    before = machine.server

    machine(Ready(1, "n", "hash-1"), Exited(1, 1), Beat(1, 5))

    assert machine.server == before


def test_a_silent_spawn_is_ended_and_counts_as_a_failure(machine: Machine) -> None:
    machine.to(State.STARTING)(Tick(), after=exits.SPAWN_TIMEOUT_S)
    assert machine.state is State.STOPPING

    machine(Exited(1, -15))
    assert machine.state is State.BACKOFF
    assert machine.server.cause is not None
    assert machine.server.cause.code == "spawn_timeout"


def test_loading_may_take_as_long_as_it_moves(machine: Machine) -> None:
    machine.to(State.LOADING)
    for step_ in range(20):
        machine(Progress(1, "weights", step_ / 20), after=SPEC.probe.load_stall - 1)(Tick())
    assert machine.state is State.LOADING

    machine(Progress(1, "weights", 19 / 20), Tick(), after=SPEC.probe.load_stall)
    assert machine.state is State.STOPPING


def test_a_loop_that_stands_still_is_degraded_then_replaced(machine: Machine) -> None:
    machine.to(State.READY)(Beat(1, 5), Tick(), after=1)
    machine(Beat(1, 5), Tick(), after=9.9)
    assert machine.state is State.READY

    machine(Tick(), after=0.1)
    assert machine.state is State.DEGRADED
    assert machine.effects == []

    machine(Tick(), after=3)
    assert machine.effects == [SendSignal("chat", 1, "TERM")]

    machine(Exited(1, 0))
    assert machine.state is State.BACKOFF
    assert machine.server.cause is not None
    assert machine.server.cause.code == "stalled"


def test_a_loop_that_moves_again_is_ready_again(machine: Machine) -> None:
    machine.to(State.DEGRADED)(Beat(1, 6))
    assert machine.state is State.READY
    assert machine.server.cause is None


def test_waking_from_sleep_degrades_nobody(machine: Machine) -> None:
    machine.to(State.READY)
    machine.now += 3600
    machine(Slept(3600.0), Tick())
    assert machine.state is State.READY


def test_delays_double_up_to_the_longest_and_vary_by_a_fifth() -> None:
    machine = Machine(replace_restart(max=10))
    delays = []
    for jitter in (0.0, 0.0, 0.0, 0.0, 1.0, -1.0):
        machine(Start() if machine.state is State.STOPPED else Tick(), Grant("n"))
        machine(Exited(machine.launch, 1, jitter=jitter))
        delays.append(machine.due())
        machine.now += machine.due()
    assert delays == pytest.approx([1, 2, 4, 4, 4.8, 3.2])


def test_more_restarts_than_allowed_is_failed_with_exit_code_and_last_lines(
    machine: Machine,
) -> None:
    machine(Start(), Grant("n"), Exited(1, 1))
    machine(Tick(), Grant("n"), Exited(2, 1), after=1)
    assert machine.state is State.BACKOFF

    machine(Tick(), Grant("n"), Exited(3, 3, tail=("a", "b")), after=2)

    assert machine.state is State.FAILED
    assert wake_at(machine.server) is None
    assert machine.server.last_exit is not None
    assert (machine.server.last_exit.code, machine.server.last_exit.tail) == (3, ("a", "b"))
    assert machine.server.cause is not None
    assert (
        machine.server.cause.message == "failed 3 times within 100 s; the last time: exited with 3"
    )


def test_no_restarts_allowed_means_failed_at_once() -> None:
    machine = Machine(replace_restart(max=0)).to(State.LOADING)
    machine(Exited(1, 1))
    assert (machine.state, machine.server.cause) == (
        State.FAILED,
        Cause("crashed", "exited with 1"),
    )


def test_failures_outside_the_window_do_not_count(machine: Machine) -> None:
    machine(Start(), Grant("n"), Exited(1, 1))
    for launch in range(2, 8):
        machine(Tick(), Grant("n"), Exited(launch, 1), after=SPEC.restart.window)
        assert machine.state is State.BACKOFF


def test_ready_for_long_enough_forgives(machine: Machine) -> None:
    machine(Start(), Grant("n"), Exited(1, 1))
    machine(Tick(), Grant("n"), Spawned(2, 4), Hello(2, "n", 1), Ready(2, "n", "hash-1"), after=1)
    assert machine.server.failures == 1

    for generation in range(10):
        machine(Beat(2, generation), Tick(), after=5)

    assert (machine.server.failures, machine.server.restarts) == (0, ())


@pytest.mark.parametrize("amends", [Start(), Restart(), Replace(SPEC, "hash-2")])
def test_a_start_or_an_edit_ends_failed_and_forgives(
    machine: Machine, amends: events.Event
) -> None:
    machine.to(State.FAILED)(amends)
    assert machine.server.queued
    assert machine.server.restarts == ()


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        (78, State.FAILED, "bad_config"),
        (66, State.BLOCKED, "model_missing"),
        (69, State.BLOCKED, "port_in_use"),
        (70, State.BACKOFF, "engine_failed"),
        (1, State.BACKOFF, "crashed"),
        (-11, State.BACKOFF, "crashed"),
        (-9, State.BACKOFF, "killed_external"),
        (0, State.STOPPED, "exited"),
    ],
)
def test_an_exit_means_what_its_code_says(
    machine: Machine, code: int, state: State, reason: str
) -> None:
    machine.to(State.READY)(Exited(1, code))
    assert machine.state is state
    assert machine.server.last_exit is not None
    assert machine.server.last_exit.classified == reason
    assert machine.server.cause is not None
    assert machine.server.cause.code == reason


@pytest.mark.parametrize(
    ("policy", "code", "state"),
    [
        ("never", 1, State.FAILED),
        ("never", 0, State.STOPPED),
        ("on-failure", 0, State.STOPPED),
        ("always", 0, State.BACKOFF),
    ],
)
def test_the_restart_policy_decides(policy: str, code: int, state: State) -> None:
    machine = Machine(replace_restart(policy=policy)).to(State.READY)
    assert machine(Exited(1, code)).state is state


def test_the_workers_own_words_explain_a_failure(machine: Machine) -> None:
    machine.to(State.LOADING)(Exited(1, 78, fatal="no such scheme", hint="write fp16"))
    assert machine.server.cause == Cause("bad_config", "no such scheme", "write fp16")


def test_a_taken_port_blocks_without_spending_a_retry(machine: Machine) -> None:
    machine(Start(), Grant("n"), SpawnFailed(1, IN_USE))
    assert (machine.state, machine.server.failures) == (State.BLOCKED, 0)
    assert events.Recheck("chat") not in machine.effects

    machine(Tick(), after=moves.RECHECK_S)
    assert machine.effects[-1] == events.Recheck("chat")

    machine(Unblock())
    assert machine.server.queued


def test_files_that_a_launch_lacked_are_looked_for_at_once(machine: Machine) -> None:
    """They may be back since the configuration was read; a look every half minute would be late."""
    gone = Cause("model_missing", "there is no folder /m")
    machine(Start(), Grant("n"), SpawnFailed(1, gone))
    assert (machine.state, machine.server.cause) == (State.BLOCKED, gone)
    assert machine.effects[-1] == events.Recheck("chat")


def test_missing_files_are_looked_for_less_often_than_a_port(machine: Machine) -> None:
    machine(Start(), Block(Cause("model_missing", "no such folder")))
    assert machine.due() == moves.RECHECK_FILES_S


def test_a_program_that_is_missing_is_retried(machine: Machine) -> None:
    machine(Start(), Grant("n"), SpawnFailed(1, Cause("spawn_failed", "no such file")))
    assert machine.state is State.BACKOFF


def test_stop_drains_then_terminates_then_kills_after_the_grace(machine: Machine) -> None:
    machine.to(State.READY)(Stop())
    assert machine.effects == [SendDrain("chat", 1, 5.0)]

    machine(Tick(), after=5)
    assert (machine.state, machine.effects[-1]) == (State.STOPPING, SendSignal("chat", 1, "TERM"))

    machine(Tick(), after=6.9)
    assert machine.effects[-1] == SendSignal("chat", 1, "TERM")

    machine(Tick(), after=0.1)
    assert machine.effects[-1] == SendSignal("chat", 1, "KILL")
    assert machine.state is State.STOPPING

    machine(Exited(1, -9))
    assert machine.state is State.STOPPED
    assert machine.server.last_exit is not None
    assert machine.server.last_exit.classified == "killed_after_grace"


def test_stop_while_loading_terminates_at_once(machine: Machine) -> None:
    machine.to(State.LOADING)(Stop())
    assert machine.effects == [SendSignal("chat", 1, "TERM")]


def test_stop_before_the_process_exists_terminates_it_when_it_does(machine: Machine) -> None:
    machine(Start(), Grant("n"), Stop())
    assert (machine.state, machine.effects) == (State.STOPPING, [Spawn("chat", 1, "n")])

    machine(Spawned(1, 40))
    assert machine.effects[-1] == SendSignal("chat", 1, "TERM")


def test_hurry_ends_the_drain_but_not_the_grace(machine: Machine) -> None:
    machine.to(State.DRAINING)(Hurry(), Hurry(), Tick())
    assert machine.effects == [SendSignal("chat", 1, "TERM")]
    assert machine.due() == SPEC.stop_grace


def test_start_during_a_stop_is_followed_by_a_new_worker(machine: Machine) -> None:
    machine.to(State.DRAINING)(Start())
    assert machine.state is State.DRAINING

    machine(Exited(1, 0))
    assert machine.server.queued


def test_stop_during_a_restart_stays_stopped(machine: Machine) -> None:
    machine.to(State.READY)(Restart(), Stop(), Exited(1, 0))
    assert machine.state is State.STOPPED


@pytest.mark.parametrize("state", [State.BACKOFF, State.BLOCKED, State.FAILED])
def test_stop_without_a_process_is_immediate(machine: Machine, state: State) -> None:
    machine.to(state)(Stop())
    assert (machine.state, machine.effects) == (State.STOPPED, [])


def test_an_edit_drains_the_old_worker_and_starts_the_newest_spec(machine: Machine) -> None:
    machine.to(State.READY)
    machine(Replace(SPEC, "hash-2"), Replace(SPEC, "hash-3"))
    assert machine.effects == [SendDrain("chat", 1, 5.0)]

    machine(Exited(1, 0), Grant("n2"))
    assert machine.server.worker is not None
    assert machine.server.worker.spec_hash == "hash-3"


def test_an_edit_that_is_taken_back_in_time_disturbs_nothing(machine: Machine) -> None:
    machine.to(State.READY)(Replace(SPEC, "hash-1"))
    assert (machine.state, machine.effects) == (State.READY, [])


def test_an_edit_of_a_stopped_server_does_not_start_it(machine: Machine) -> None:
    machine.to(State.DRAINING)(Exited(1, 0), Replace(SPEC, "hash-2"))
    assert machine.state is State.STOPPED


def test_a_live_change_reaches_the_worker_and_its_timers(machine: Machine) -> None:
    machine.to(State.READY)(Update(replace_restart(policy="never")))
    assert machine.effects == [SendLive("chat", 1)]
    assert machine(Exited(1, 1)).state is State.FAILED


NO_PROCESS = {State.STOPPED, State.BLOCKED, State.BACKOFF, State.FAILED}

POSSIBLE: dict[State, set[State]] = {
    State.STOPPED: {State.STARTING},
    State.BLOCKED: {State.STARTING, State.STOPPED},
    State.STARTING: {
        *(State.LOADING, State.STOPPING, State.STOPPED, State.BLOCKED, State.BACKOFF, State.FAILED)
    },
    State.LOADING: {
        *(State.READY, State.STOPPING, State.STOPPED, State.BLOCKED, State.BACKOFF, State.FAILED)
    },
    State.READY: {
        *(State.DEGRADED, State.DRAINING, State.STOPPING),
        *(State.STOPPED, State.BLOCKED, State.BACKOFF, State.FAILED),
    },
    State.DEGRADED: {
        *(State.READY, State.DRAINING, State.STOPPING),
        *(State.STOPPED, State.BLOCKED, State.BACKOFF, State.FAILED),
    },
    State.DRAINING: {State.STOPPING, State.STOPPED, State.STARTING},
    State.STOPPING: {State.STOPPED, State.STARTING, State.BACKOFF, State.FAILED},
    State.BACKOFF: {State.STARTING, State.STOPPED, State.BLOCKED},
    State.FAILED: {State.STARTING, State.STOPPED},
}

EVENTS: list[events.Event] = [
    *(Start(), Stop(), Restart(), Hurry(), Replace(SPEC, "hash-1"), Replace(SPEC, "hash-2")),
    *(Update(SPEC), Block(IN_USE), Unblock(), Grant("n2"), Share(9)),
    *(Spawned(1, 40), SpawnFailed(1, IN_USE), SpawnFailed(1, Cause("spawn_failed", "x"))),
    *(Hello(1, "n", 1), Hello(1, "x", 1), Progress(1, "weights", 0.7), Garbled(1, "x")),
    *(
        Ready(1, "n", "hash-1"),
        Ready(1, "n", "hash-2"),
        Beat(1, 0),
        Beat(1, 9),
        Measured(1, 9),
        Tick(),
        Slept(9.0),
    ),
    *(Exited(1, code) for code in (0, 1, 66, 69, 70, 78, -9, -15)),
]


@pytest.mark.parametrize("event", EVENTS, ids=repr)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state_is_a_possible_transition(
    state: State, event: events.Event
) -> None:
    machine = Machine().to(state)
    before = machine.server

    machine(event, after=1000.0 if isinstance(event, Tick) else 0.0)

    assert machine.state is state or machine.state in POSSIBLE[state]
    assert (machine.server.worker is None) or machine.state not in NO_PROCESS
    assert (machine.server.worker is not None) or machine.state in NO_PROCESS | {State.STARTING}
    assert machine.state is not State.STARTING or machine.server.desired is Desired.RUNNING
    if before.worker is not None and machine.server.worker is not None:
        assert machine.server.worker.launch == before.worker.launch
    assert len([it for it in machine.effects if isinstance(it, Spawn)]) <= (
        1 if before.queued else 0
    )


def replace_restart(**changes: object) -> ServerSpec:
    restart = SPEC.restart.model_copy(update=changes)
    return SPEC.model_copy(update={"restart": restart})


def test_the_table_of_transitions_covers_every_state() -> None:
    assert set(POSSIBLE) == set(State)
    assert {type(event) for event in EVENTS} == set(events.Event.__args__)
