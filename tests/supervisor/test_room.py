"""A fleet with little memory: who starts, who waits, who is blocked, and who gives what back."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daemon.config.spec import RestartSpec, ServerSpec
from daemon.policy.claim import Claim
from daemon.supervisor import events, plan, room
from daemon.supervisor.events import SendLive, Spawn
from daemon.supervisor.plan import Adjust, Apply, Fleet, Measured, Put, Remove, Told
from daemon.supervisor.server import NO_MEMORY, Desired, Server, State

MIB = 2**20


def spec(port: int, **keys: object) -> ServerSpec:
    restart = RestartSpec(max=3, window=100.0, backoff=(1.0, 4.0), stable_after=50.0)
    return ServerSpec(model="m", port=port, restart=restart, **keys)  # type: ignore[arg-type]


def claim(needs: int, sequences: int = 1) -> Claim:
    """Return a claim that needs so many MiB, one of them for a sequence."""
    return Claim((needs - 1) * MIB, 0, 0, MIB, sequences * MIB)


def put(name: str, needs: int, sequences: int = 1, version: int = 1) -> Put:
    port = 8000 + sum(map(ord, name))
    return Put(
        name, spec(port), f"{name}-{version}", Desired.RUNNING, claim=claim(needs, sequences)
    )


class House:
    """A fleet with a budget in MiB, whose processes come and go as its effects say."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.fleet = Fleet("boot")
        self.now = 0.0
        self.shares: dict[str, list[int]] = {}

    def do(self, event: plan.Event) -> House:
        self.fleet, effects = plan.step(self.fleet, event, self.now)
        for effect in effects:
            match effect:
                case Spawn(name, launch, _, share):
                    self.shares.setdefault(name, []).append(share // MIB)
                    self.do(Told(name, events.Spawned(launch, 100)))
                case SendLive(name, _, share):
                    self.shares[name].append(share // MIB)
                case _:
                    pass
        return self

    def apply(self, *changes: Put | Remove | Adjust, budget: int | None = None) -> House:
        self.budget = budget or self.budget
        return self.do(Apply(changes, 8, self.budget * MIB))

    def ready(self, *names: str) -> House:
        for name in names:
            worker = self.fleet.servers[name].worker
            assert worker is not None
            self.do(Told(name, events.Hello(worker.launch, worker.nonce, 1)))
            self.do(Told(name, events.Ready(worker.launch, worker.nonce, worker.spec_hash)))
        return self

    def beat(self, name: str, promised: int) -> House:
        worker = self.fleet.servers[name].worker
        assert worker is not None
        beat = events.Beat(worker.launch, worker.generation + 1, promised * MIB)
        return self.do(Told(name, beat))

    def exit(self, name: str, code: int = 0) -> House:
        worker = self.fleet.servers[name].worker
        assert worker is not None
        return self.do(Told(name, events.Exited(worker.launch, code)))

    def measure(self, available: int | None = None, **used: int) -> House:
        found = {
            (name, server.worker.launch): used.get(name, 0) * MIB
            for name, server in self.fleet.servers.items()
            if server.worker
        }
        return self.do(Measured(found, None if available is None else available * MIB))

    def __getitem__(self, name: str) -> Server:
        return self.fleet.servers[name]

    @property
    def states(self) -> dict[str, str]:
        return {name: str(server.state) for name, server in self.fleet.servers.items()}

    @property
    def held(self) -> int:
        return sum(room.held(self.fleet.servers).values()) // MIB


def test_servers_that_start_together_share_what_their_needs_leave() -> None:
    house = House(30).apply(put("a", 10, 8), put("b", 10, 8))
    assert house.shares == {"a": [15], "b": [15]}


def test_one_that_does_not_fit_is_blocked_with_the_numbers_and_the_others_start() -> None:
    house = House(30).apply(put("a", 10), put("b", 15), put("c", 8))
    assert house.states == {"a": "starting", "b": "starting", "c": "blocked"}
    cause = house["c"].cause
    assert cause is not None
    assert cause.code == NO_MEMORY
    assert cause.message.startswith(
        "it needs 8.0 MiB, and 5.0 MiB of the 30.0 MiB for all servers are free:"
        " a holds 10.0 MiB, b holds 15.0 MiB"
    )
    assert house["c"].attempt_at is None  # nothing polls: whoever frees memory lifts the block


def test_a_blocked_server_starts_by_itself_once_there_is_room() -> None:
    house = House(30).apply(put("a", 10), put("b", 15), put("c", 8)).ready("a", "b")
    house.do(Told("a", events.Stop()))
    assert house["c"].state is State.STARTING  # its turn comes when a is gone
    assert house["c"].worker is None
    house.exit("a")
    assert house["c"].worker is not None


def test_a_newcomer_waits_until_the_others_have_given_back_what_they_may_spare() -> None:
    house = House(30).apply(put("a", 10, 100)).ready("a")
    house.beat("a", promised=30)
    house.apply(put("b", 10, 100))
    assert house.shares["a"] == [30, 15]
    assert (house["b"].state, house["b"].worker) == (State.STARTING, None)

    house.beat("a", promised=28)  # requests that run still need it
    assert house["b"].worker is None

    house.beat("a", promised=15)
    assert house.shares["b"] == [15]
    assert house.held == 30


def test_what_the_gone_leave_goes_to_those_that_stay() -> None:
    house = House(30).apply(put("a", 10, 100), put("b", 10, 100)).ready("a", "b")
    house.apply(Remove("b")).exit("b")
    assert house.shares["a"] == [15, 30]


def test_a_lower_budget_ends_nothing_and_starts_nothing() -> None:
    house = House(40).apply(put("a", 10, 8), put("b", 10, 8)).ready("a", "b")
    house.apply(put("c", 5), budget=15)
    assert house.states == {"a": "ready", "b": "ready", "c": "blocked"}
    assert house.shares["a"][-1] == 10  # what it needs, no more
    assert house.held > house.budget
    house.apply(budget=40)
    assert house["c"].worker is not None


def test_a_process_that_uses_more_than_planned_counts_with_that() -> None:
    house = House(30).apply(put("a", 10)).ready("a").measure(a=25)
    house.apply(put("b", 10))
    assert house["b"].state is State.BLOCKED
    house.measure(a=10)
    assert house["b"].worker is not None


def test_more_concurrency_is_admitted_again_without_a_restart() -> None:
    house = House(30).apply(put("a", 10, 2)).ready("a")
    assert house.shares["a"] == [11]
    house.apply(Adjust("a", spec(1), claim(10, 100)))
    assert house.shares["a"][-1] == 30
    assert house["a"].state is State.READY


def test_an_earlier_one_that_waits_for_memory_is_not_overtaken() -> None:
    house = House(30).apply(put("a", 10, 100)).ready("a")
    house.beat("a", promised=25)
    house.apply(put("big", 15), put("small", 5))
    assert house["small"].worker is None  # the 5 that are free are set aside for the one before it
    house.beat("a", promised=10)
    assert [house[name].worker is not None for name in ("big", "small")] == [True, True]


def test_after_a_kill_from_outside_the_machine_must_have_the_memory_first() -> None:
    house = House(100).apply(put("a", 40)).ready("a").measure(available=100)
    house.exit("a", -9)
    assert house["a"].state is State.BACKOFF
    house.measure(available=10)
    house.now += 10
    house.do(plan.Passed())
    cause = house["a"].cause
    assert cause is not None
    assert (house["a"].state, cause.code) == (State.BLOCKED, NO_MEMORY)
    assert "killed from outside" in cause.message
    assert "10.0 MiB available" in cause.message
    assert house["a"].restarts_total == 1  # waiting is no retry
    last = house["a"].last_exit
    assert last is not None
    assert last.classified == "killed_external"

    house.measure(available=60)
    assert house["a"].worker is not None


def test_after_any_other_end_only_the_plan_counts() -> None:
    house = House(100).apply(put("a", 40)).ready("a").measure(available=1)
    house.exit("a", 1)
    house.now += 10
    house.do(plan.Passed())
    assert house["a"].worker is not None


def test_servers_of_which_nothing_is_known_start_without_a_share() -> None:
    house = House(1).apply(replace(put("a", 10), claim=None))
    assert house.shares == {"a": [0]}


class Crowd(RuleBasedStateMachine):
    """Servers of any size come, go, grow and promise; what is held never passes the budget on purpose."""

    NAMES = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.house = House(60)
        self.house.apply()

    def worker(self, name: str) -> bool:
        server = self.house.fleet.servers.get(name)
        return server is not None and server.worker is not None

    @rule(name=NAMES, needs=st.integers(1, 40), sequences=st.integers(1, 60), version=st.integers())
    def put(self, name: str, needs: int, sequences: int, version: int) -> None:
        self.house.apply(put(name, needs, sequences, version))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if name in self.house.fleet.servers:
            self.house.apply(Remove(name))

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        if self.worker(name) and self.house[name].state in (State.STARTING, State.LOADING):
            self.house.ready(name)

    @rule(name=NAMES, spare=st.floats(0, 1))
    def serve(self, name: str, spare: float) -> None:
        """A worker reports: what runs takes no more than it was allowed when that started."""
        if self.worker(name) and self.house[name].state is State.READY:
            worker = self.house[name].worker
            assert worker is not None
            kept = max(worker.share, int(worker.promised * spare)) // MIB
            self.house.beat(name, kept)

    @rule(name=NAMES, code=st.sampled_from([0, 1, -9]))
    def end(self, name: str, code: int) -> None:
        if self.worker(name):
            self.house.exit(name, code)

    @rule()
    def wait(self) -> None:
        self.house.now += 61
        self.house.do(plan.Passed())

    @invariant()
    def nobody_holds_what_another_has(self) -> None:
        assert self.house.held <= self.house.budget

    @invariant()
    def every_living_worker_has_what_it_needs(self) -> None:
        for server in self.house.fleet.servers.values():
            worker = server.worker
            if worker is not None and worker.ending is None and worker.claim is not None:
                assert worker.share >= worker.claim.needs_bytes

    @invariant()
    def a_block_is_lifted_as_soon_as_there_is_room(self) -> None:
        servers = self.house.fleet.servers
        others = sum(
            max(it.worker.share, it.worker.used) for it in servers.values() if it.worker
        ) + sum(it.claim.needs_bytes for it in servers.values() if it.queued and it.claim)
        for server in room.kept_out(servers):
            assert server.claim is not None
            if server.last_exit is None or server.last_exit.classified != "killed_external":
                assert server.claim.needs_bytes + others > self.house.budget * MIB


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
