"""Many servers together: order, turns, addresses, and random histories that must never go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daemon.config.spec import ProbeSpec, RestartSpec, ServerSpec
from daemon.supervisor import deadlines, events, plan
from daemon.supervisor.events import (
    Beat,
    Block,
    Exited,
    Hello,
    Hurry,
    Ready,
    Restart,
    SendDrain,
    SendSignal,
    Spawn,
    Spawned,
    Start,
    Stop,
)
from daemon.supervisor.listeners import listeners, same_listeners
from daemon.supervisor.plan import (
    Apply,
    Close,
    Fleet,
    LeftoverGone,
    Passed,
    Put,
    Remove,
    Told,
)
from daemon.supervisor.server import Address, Cause, Desired, State

GRACE_S = 7.0


def spec(port: int) -> ServerSpec:
    return ServerSpec(
        model="m",
        port=port,
        restart=RestartSpec(max=3, window=100.0, backoff=(1.0, 4.0), stable_after=50.0),
        probe=ProbeSpec(interval=1.0, stall=10.0, load_stall=20.0),
        drain_timeout=5.0,
        stop_grace=GRACE_S,
    )


def put(name: str, port: int, version: int = 1, desired: Desired = Desired.RUNNING) -> Put:
    return Put(name, spec(port), f"{name}-{version}", desired)


@dataclass
class World:
    """A fleet, and the processes that its effects make."""

    fleet: Fleet = field(default_factory=lambda: Fleet(boot="boot"))
    now: float = 0.0
    alive: dict[tuple[str, int], str] = field(default_factory=dict)
    terminated_at: dict[tuple[str, int], float] = field(default_factory=dict)
    effects: list[events.Effect] = field(default_factory=list)

    def do(self, event: plan.Event) -> None:
        self.fleet, effects = plan.step(self.fleet, event, self.now)
        for effect in effects:
            self.effects.append(effect)
            self._happen(effect)

    def tell(self, name: str, event: events.Event) -> None:
        self.do(Told(name, event))

    def apply(self, *changes: Put | Remove, parallel: int = 1) -> None:
        self.do(Apply(changes, parallel))

    def load(self, name: str) -> None:
        """Let the newest worker of *name* say hello and become ready."""
        launch, nonce = self.newest(name)
        self.tell(name, Hello(launch, nonce, 1))
        worker = self.fleet.servers[name].worker
        assert worker is not None
        self.tell(name, Ready(launch, nonce, worker.spec_hash))

    def exit(self, name: str, code: int) -> None:
        launch, _ = self.newest(name)
        del self.alive[name, launch]
        self.tell(name, Exited(launch, code))

    def newest(self, name: str) -> tuple[int, str]:
        launch = max(number for owner, number in self.alive if owner == name)
        return launch, self.alive[name, launch]

    def states(self) -> dict[str, str]:
        return {name: str(server.state) for name, server in self.fleet.servers.items()}

    def spawned(self) -> list[str]:
        return [effect.name for effect in self.effects if isinstance(effect, Spawn)]

    def _happen(self, effect: events.Effect) -> None:
        match effect:
            case Spawn(name, launch, nonce):
                assert all(owner != name for owner, _ in self.alive), "two processes of one server"
                self.alive[name, launch] = nonce
                self.tell(name, Spawned(launch, 1000 + launch))
            case SendSignal(name, launch, "TERM"):
                self.terminated_at[name, launch] = self.now
            case SendSignal(name, launch, "KILL"):
                assert self.now >= self.terminated_at[name, launch] + GRACE_S, "killed too early"


def test_models_load_one_after_another_in_the_order_of_the_file() -> None:
    world = World()
    world.apply(put("zeta", 1), put("alpha", 2), put("mid", 3))
    assert world.spawned() == ["zeta"]

    world.load("zeta")
    world.load("alpha")
    assert world.spawned() == ["zeta", "alpha", "mid"]


def test_max_parallel_loads_may_be_more_than_one() -> None:
    world = World()
    world.apply(put("a", 1), put("b", 2), put("c", 3), parallel=2)
    assert world.spawned() == ["a", "b"]


def test_a_server_that_is_blocked_from_the_start_lets_the_others_pass() -> None:
    world = World()
    missing = Cause("model_missing", "no such folder")
    world.apply(Put("a", spec(1), "h", Desired.RUNNING, missing), put("b", 2))
    assert world.states() == {"a": "blocked", "b": "starting"}
    assert world.spawned() == ["b"]


def test_a_crash_while_loading_frees_the_turn() -> None:
    world = World()
    world.apply(put("a", 1), put("b", 2))
    world.exit("a", 1)
    assert world.spawned() == ["a", "b"]


def test_an_edit_touches_only_the_servers_it_names() -> None:
    world = World()
    world.apply(put("a", 1), put("b", 2))
    world.load("a")
    world.load("b")
    before = world.fleet.servers["b"]

    world.apply(put("a", 1, 2))

    assert world.fleet.servers["b"] == before
    assert world.states()["a"] == "draining"


def test_additions_wait_for_what_removals_free() -> None:
    world = World()
    world.apply(put("old", 1))
    world.load("old")
    world.apply(Remove("old"), put("new", 2))
    assert world.spawned() == ["old"]

    world.exit("old", 0)
    assert world.spawned() == ["old", "new"]
    assert "old" not in world.fleet.servers


def test_an_addition_does_not_wait_for_a_removal_that_was_taken_back() -> None:
    world = World()
    world.apply(put("old", 1))
    world.load("old")
    world.apply(Remove("old"), put("new", 2))
    world.apply(put("old", 1, 2))
    assert world.spawned() == ["old", "new"]


def test_two_servers_swap_ports_without_sharing_one() -> None:
    world = World()
    world.apply(put("a", 1), put("b", 2), parallel=2)
    world.load("a")
    world.load("b")
    world.apply(put("a", 2, 2), put("b", 1, 2), parallel=2)

    world.exit("a", 0)
    assert world.spawned() == ["a", "b"]  # b's old worker still listens on port 2

    world.exit("b", 0)
    assert world.spawned() == ["a", "b", "a", "b"]


def test_an_edit_that_disables_a_server_stops_it_and_keeps_the_entry() -> None:
    world = World()
    world.apply(put("a", 1))
    world.load("a")
    world.apply(put("a", 1, 2, Desired.STOPPED))
    world.exit("a", 0)
    assert world.states() == {"a": "stopped"}

    world.apply(put("a", 1, 3))
    assert world.spawned() == ["a", "a"]


def test_a_removed_server_that_comes_back_is_started_again() -> None:
    world = World()
    world.apply(put("a", 1))
    world.load("a")
    world.apply(Remove("a"))
    world.apply(put("a", 1))
    world.exit("a", 0)
    assert world.spawned() == ["a", "a"]


def test_nothing_is_launched_beside_a_worker_of_an_earlier_daemon() -> None:
    world = World(Fleet(boot="boot", leftovers={"a": 77}))
    world.apply(put("a", 1), put("b", 2))
    assert world.spawned() == ["b"]

    world.load("b")
    world.do(LeftoverGone("a"))
    assert world.spawned() == ["b", "a"]


def test_closing_stops_everything_and_launches_nothing() -> None:
    world = World()
    world.apply(put("a", 1), put("b", 2), put("c", 3))
    world.load("a")
    world.do(Close())
    world.exit("b", -15)
    world.tell("c", Start())
    assert not plan.settled(world.fleet)

    world.exit("a", 0)
    assert plan.settled(world.fleet)
    assert world.spawned() == ["a", "b"]
    assert listeners(world.fleet) == {}


def test_nonces_differ_between_servers_launches_and_daemons() -> None:
    nonces = set()
    for boot in ("one", "two"):
        world = World(Fleet(boot=boot))
        world.apply(put("a", 1), put("b", 2), parallel=2)
        world.exit("a", 1)
        world.tell("a", Start())
        nonces |= {effect.nonce for effect in world.effects if isinstance(effect, Spawn)}
    assert len(nonces) == 6


def test_a_socket_is_open_exactly_while_a_server_runs_or_is_about_to() -> None:
    here = Address("127.0.0.1", 1)
    world = World()
    world.apply(put("a", 1))
    assert listeners(world.fleet)[here].away is None

    world.exit("a", 1)
    assert world.states() == {"a": "backoff"}
    assert listeners(world.fleet)[here].away == world.fleet.servers["a"]

    world.tell("a", Start())
    world.exit("a", 78)
    assert world.states() == {"a": "failed"}
    assert listeners(world.fleet) == {}


def test_a_new_port_is_held_while_the_old_worker_drains() -> None:
    world = World()
    world.apply(put("a", 1))
    world.load("a")
    world.apply(put("a", 2, 2))
    assert {it.port for it in listeners(world.fleet)} == {1, 2}

    world.exit("a", 0)
    assert {it.port for it in listeners(world.fleet)} == {2}


NAMES = st.sampled_from(["a", "b", "c"])
PORTS = {"a": 1, "b": 2, "c": 3}


class RandomHistory(RuleBasedStateMachine):
    """Users, edits, crashes, deaf workers and time, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Fleet(boot="boot", leftovers={"b": 77}))
        self.world.apply(*(put(name, port) for name, port in PORTS.items()))
        self.version = 1

    @rule(
        name=NAMES,
        event=st.sampled_from([Start(), Stop(), Restart(), Hurry(), events.Unblock()]),
    )
    def the_user_asks(self, name: str, event: events.Event) -> None:
        self.world.tell(name, event)

    @rule(name=NAMES)
    def the_port_is_taken(self, name: str) -> None:
        self.world.tell(name, Block(Cause("port_in_use", "taken")))

    @rule(name=NAMES, port=st.sampled_from([1, 2, 3, 4]), desired=st.sampled_from(Desired))
    def an_edit_replaces(self, name: str, port: int, desired: Desired) -> None:
        if all(it.address.port != port for it in self.world.fleet.servers.values()):
            self.version += 1
            self.world.apply(put(name, port, self.version, desired))

    @rule(name=NAMES, parallel=st.integers(1, 3))
    def an_edit_removes_or_adds(self, name: str, parallel: int) -> None:
        fleet = self.world.fleet
        if name in fleet.servers and name not in fleet.removed:
            self.world.apply(Remove(name), parallel=parallel)
        elif all(it.address.port != PORTS[name] for it in fleet.servers.values()):
            self.world.apply(put(name, PORTS[name]), parallel=parallel)

    @rule(name=NAMES)
    def a_left_over_worker_ends(self, name: str) -> None:
        self.world.do(LeftoverGone(name))

    @rule(name=NAMES)
    def a_worker_says_hello(self, name: str) -> None:
        if any(owner == name for owner, _ in self.world.alive):
            launch, nonce = self.world.newest(name)
            self.world.tell(name, Hello(launch, nonce, 1))

    @rule(name=NAMES)
    def a_worker_is_ready(self, name: str) -> None:
        worker = self.world.fleet.servers[name].worker if name in self.world.fleet.servers else None
        if worker is not None and worker.stage is None:
            self.world.tell(name, Ready(worker.launch, worker.nonce, worker.spec_hash))

    @rule(name=NAMES, generation=st.integers(0, 1000))
    def a_worker_beats(self, name: str, generation: int) -> None:
        if any(owner == name for owner, _ in self.world.alive):
            self.world.tell(name, Beat(self.world.newest(name)[0], generation))

    @rule(name=NAMES, code=st.sampled_from([0, 1, 66, 69, 70, 78, -9, -15]))
    def a_worker_exits(self, name: str, code: int) -> None:
        if any(owner == name for owner, _ in self.world.alive):
            self.world.exit(name, code)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 30.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.world.now + seconds
        while (due := plan.wake_at(self.world.fleet)) is not None and due <= until:
            self.world.now = max(self.world.now, due)
            self.world.do(Passed())
        self.world.now = until

    @invariant()
    def processes_and_states_agree(self) -> None:
        known = {
            (name, server.worker.launch)
            for name, server in self.world.fleet.servers.items()
            if server.worker is not None
        }
        assert known == self.world.alive.keys()

    @invariant()
    def no_worker_beside_a_left_over(self) -> None:
        assert not {name for name, _ in self.world.alive} & self.world.fleet.leftovers.keys()

    @invariant()
    def no_two_workers_share_an_address(self) -> None:
        addresses = [
            it.worker.address for it in self.world.fleet.servers.values() if it.worker is not None
        ]
        assert len(addresses) == len(set(addresses))

    @invariant()
    def restarts_stay_within_the_limit(self) -> None:
        for server in self.world.fleet.servers.values():
            assert len(server.restarts) <= server.spec.restart.max

    @invariant()
    def a_stopped_server_goes_down(self) -> None:
        for server in self.world.fleet.servers.values():
            if server.desired is Desired.STOPPED:
                assert server.state in (State.STOPPED, State.DRAINING, State.STOPPING)

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        """A server on its way somewhere has a moment at which it is looked at again."""
        for server in self.world.fleet.servers.values():
            moving = server.state in (
                *(State.LOADING, State.READY, State.DEGRADED, State.DRAINING),
                *(State.BACKOFF, State.BLOCKED),
            )
            killed = server.worker is not None and server.worker.killed
            assert not moving or killed or deadlines.wake_at(server) is not None


RandomHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestRandomHistory = RandomHistory.TestCase


def test_a_drained_worker_is_told_before_it_is_signalled() -> None:
    world = World()
    world.apply(put("a", 1))
    world.load("a")
    world.tell("a", Stop())
    world.now = 5.0
    world.do(Passed())
    assert world.effects[-2:] == [SendDrain("a", 1, 5.0), SendSignal("a", 1, "TERM")]


def test_heartbeats_together_do_what_each_does_alone() -> None:
    together, alone = World(), World()
    for world in (together, alone):
        world.apply(put("a", 1), put("b", 2))
        world.load("a")
        world.load("b")
        world.now += 3.0
    news = (Told("a", Beat(1, 5, 10)), Told("b", Beat(1, 7)), Told("a", Beat(1, 5, 20)))

    together.do(plan.Beats(news))
    for told in news:
        alone.do(told)

    assert together.fleet == alone.fleet
    worker = together.fleet.servers["a"].worker
    assert worker is not None
    assert (worker.moved_at, worker.promised) == (together.now, 20)


def test_a_turn_that_changes_no_address_is_known_as_one() -> None:
    world = World()
    world.apply(put("a", 1), put("b", 2))
    world.load("a")
    before = world.fleet
    world.tell("a", Beat(1, 5))
    assert before.servers["a"] is not world.fleet.servers["a"]
    assert same_listeners(before, world.fleet, plan.changed(before, world.fleet))

    for change in (
        Told("b", Exited(1, 1)),
        Told("a", Stop()),
        Apply((put("a", 3, 2),), 1),
        Apply((Remove("b"), put("c", 4)), 1),
        Close(),
    ):
        after, _ = plan.step(before, change, 0.0)
        assert not same_listeners(before, after, plan.changed(before, after))


def test_remembered_wakes_are_those_of_the_fleet() -> None:
    world, wakes = World(), plan.Wakes()
    world.apply(put("a", 1), put("b", 2))
    world.load("a")
    wakes.follow(world.fleet, world.fleet.servers)
    for now, event in ((1.0, Beat(1, 5)), (2.0, Stop()), (3.0, Exited(1, 0))):
        world.now = now
        before = world.fleet
        world.tell("a", event)
        wakes.follow(world.fleet, plan.changed(before, world.fleet))
        assert wakes.next() == plan.wake_at(world.fleet)
    world.exit("b", 1)
    wakes.follow(world.fleet, ["b"])
    assert wakes.next() == plan.wake_at(world.fleet) is not None
    world.apply(Remove("b"))
    wakes.follow(world.fleet, ())
    assert wakes.next() == plan.wake_at(world.fleet)
