"""A daemon in a simulated world: the real decisions, and effects that happen to the world.

What `Reconciler`, `Configuration` and `Workers` do thinly around the pure core is done here as thinly
against the world, with every delay chosen by the world's scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from daemon.config.diff import diff
from daemon.config.prepare import Prepared, PreparedServer
from daemon.config.spec import DaemonSpec
from daemon.errors import Problem
from daemon.supervisor import edits, events, intake, listeners, plan
from daemon.supervisor.plan import Fleet, Told
from daemon.supervisor.reconcile import IDLE_S, SLEPT_S
from daemon.supervisor.server import Address, Cause, Desired
from tests.simulation.world import (
    BUDGET,
    DRAIN_S,
    FIRST_BACKOFF_S,
    GRACE_S,
    MAX_RESTARTS,
    STABLE_S,
    WINDOW_S,
    BrokenError,
    Entry,
    Process,
    Text,
    World,
    prepared_server,
)
from tests.supervisor import configurations

LEASE_DRAIN_S = 12.0
_NEVER = float("inf")


@dataclass
class Disk:
    """What outlives a daemon."""

    desired: dict[str, Desired] = field(default_factory=dict)
    last_good: Text | None = None
    launches: dict[str, int] = field(default_factory=dict)
    register: dict[str, int] = field(default_factory=dict)
    """name → pid"""


@dataclass
class Account:
    """What the world remembers about one name, to judge what the daemon does to it."""

    touch: int = 0
    """Grows with every user command and accepted edit that concerns the name."""
    failures: list[float] = field(default_factory=list)
    """Launches that nobody asked for, since the last one that somebody did."""
    last_launch: int = 0
    ended_at: float = float("-inf")
    free_retries: int = 0
    """Launches that need no delay: after a rollback, or what had blocked the server went away."""
    went_back: bool = False
    """Whether it was rolled back since somebody last asked for something."""


class Daemon:
    """One life of a daemon."""

    def __init__(self, world: World, disk: Disk, accounts: dict[str, Account], boot: int) -> None:
        self.world = world
        self.disk = disk
        self.accounts = accounts
        self.alive = True
        self.frozen = False
        self.accepted = Text()
        self._texts: dict[str, Text] = {}
        leftovers = {name: pid for name, pid in disk.register.items() if world.processes[pid].alive}
        disk.register = dict(leftovers)
        self.fleet = Fleet(f"boot-{boot}", leftovers=leftovers, launched=dict(disk.launches))
        self.sockets: set[Address] = set()
        self.reserved: set[Address] = set()
        self.excused: set[int] = set()
        self._queue: deque[plan.Event] = deque()
        self._sections: dict[tuple[str, str], PreparedServer] = {}
        self._turning = False
        self._turned_at = world.now
        self._woken = (self.fleet, 0.0)
        self.applied: Prepared = configurations.prepared()
        self.intake = intake.Intake(world.look(), look_at=world.now + intake.POLL_S)
        self.mode = world.rng.choice(["auto"] * 9 + ["manual"])
        for name, pid in leftovers.items():
            self._see_out(name, world.processes[pid])

    # life and death

    def start(self) -> bool:
        """Read the file, or what was last good; return whether there is anything to run from."""
        text = self.world.text
        if text is None or not text.valid:
            text = self.disk.last_good
        if text is None:
            self.alive = False
            return False
        self.applied = self._prepared(text)
        steps = diff({}, self.applied.servers)
        self._accept(text)
        self._submit(self.applied, edits.changes(steps, {}, self.applied.servers, self.desired_of))
        return True

    def die(self) -> None:
        """SIGKILL: sockets close, leases end."""
        self.alive = False
        self.world.note("the daemon is killed")
        self._orphan()

    def _orphan(self) -> None:
        for process in self.world.alive():
            if process.orphaned_at is None:
                process.orphaned_at = self.world.now
                if not process.deaf:
                    self.world.after(self.world.rng.uniform(0, 10), self._gone, process, 0)

    def _see_out(self, name: str, process: Process) -> None:
        def term() -> None:
            if self.alive and process.alive and not process.deaf:
                self._gone(process, -15)

        def kill() -> None:
            if self.alive and process.alive:
                self._gone(process, -9)

        def look() -> None:
            if not self.alive:
                return
            if process.alive:
                self.world.after(0.1 + self.world.rng.random(), look)
                return
            if self.disk.register.get(name) == process.pid:
                del self.disk.register[name]
            self.deliver(plan.LeftoverGone(name))

        self.world.after(LEASE_DRAIN_S, term)
        self.world.after(LEASE_DRAIN_S + GRACE_S, kill)
        look()

    def _gone(self, process: Process, code: int) -> None:
        """*process* ends; its daemon hears of it a moment later."""
        if not process.alive:
            return
        process.alive = False
        account = self.accounts[process.name]
        account.ended_at = self.world.now
        if process.ready_at is not None and self.world.now - process.ready_at >= STABLE_S:
            account.failures.clear()
        self.world.note(f"{process.name}#{process.launch} ends with {code}")
        self.world.after(self.world.rng.uniform(0, 0.05), self._reaped, process, code)

    def _reaped(self, process: Process, code: int) -> None:
        if not self.alive or process.nonce != self._nonce(process.name, process.launch):
            return
        if self.disk.register.get(process.name) == process.pid:
            del self.disk.register[process.name]
        jitter = self.world.rng.uniform(-1, 1)
        server = self.fleet.servers[process.name]
        account = self.accounts[process.name]
        goes_back = server.previous is not None and process.ready_at is None
        if code in (66, 69) or (goes_back and not account.went_back):
            account.free_retries += 1
        account.went_back |= goes_back
        self.deliver(Told(process.name, events.Exited(process.launch, code, jitter=jitter)))

    def _nonce(self, name: str, launch: int) -> str | None:
        server = self.fleet.servers.get(name)
        worker = None if server is None else server.worker
        return worker.nonce if worker is not None and worker.launch == launch else None

    # turns, as Reconciler has them

    def deliver(self, event: plan.Event) -> None:
        """Put *event* in the queue; a daemon that stands still finds it later."""
        self._queue.append(event)
        self._turn()

    def freeze(self, seconds: float) -> None:
        """The daemon alone gets no time."""
        self.frozen = True
        self._turned_at = self.world.now
        self.world.note(f"the daemon stands still for {seconds:.0f} s")
        self.world.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        self._wake()

    def sleep(self, seconds: float) -> None:
        """The machine, and with it the daemon, stands still."""
        self._turned_at = self.world.now
        self.world.note(f"the machine sleeps for {seconds:.0f} s")
        self.world.sleep(seconds)
        self.excused.add(
            self.world.identity
        )  # whoever writes it slept too: no doubt is long enough
        for process in self.world.alive() if seconds > IDLE_S + SLEPT_S else ():
            for when in ("draining_since", "term_at"):  # the daemon grants what it slept through
                if (at := getattr(process, when)) is not None:
                    setattr(process, when, at + seconds)
        self._wake()

    def _wake(self) -> None:
        gap = self.world.now - self._turned_at
        if gap > IDLE_S + SLEPT_S:
            self._queue.appendleft(plan.Woke(gap))
        self._turn()

    def next_at(self) -> float:
        """Return when time alone leads to something."""
        if self.frozen or not self.alive:
            return _NEVER
        return min(self._wake_at(), _NEVER if self._sees_nothing_new() else self.intake.look_at)

    def _wake_at(self) -> float:
        known_for, at = self._woken
        if known_for is not self.fleet:
            due = plan.wake_at(self.fleet)
            at = _NEVER if due is None else due
            self._woken = (self.fleet, at)
        return at

    def _sees_nothing_new(self) -> bool:
        """Whether looks at the file lead to nothing until it is written; then they need not be played."""
        reading = self.intake
        waits = reading.suspect is not None or reading.moving is not None
        return not waits and reading.seen == self.world.look()

    def file_written(self) -> None:
        """The next look is as near as chance has it; sometimes the system tells."""
        if self.alive and self.intake.moving is None:
            now, rng = self.world.now, self.world.rng
            at = max(self.intake.look_at, now + rng.uniform(0, intake.POLL_S))
            self.intake = replace(self.intake, look_at=at)
            if not self.frozen and rng.random() < 0.5:
                self.put(intake.Nudged())

    def pass_time(self) -> None:
        """Do what has become due."""
        now = self.world.now
        if self._wake_at() <= now:
            self.deliver(plan.Passed())
        if self.alive and self.intake.look_at <= now:
            self.put(intake.Looked(self.world.look()))

    def _turn(self) -> None:
        if self._turning or self.frozen or not self.alive:
            return
        self._turning = True
        while self._queue:
            self.fleet, effects = plan.step(self.fleet, self._queue.popleft(), self.world.now)
            self._arrange_sockets()
            for effect in effects:
                self._carry_out(effect)
        self._turning = False
        if self.fleet.closing and plan.settled(self.fleet):
            self.alive = False
            self.world.note("the daemon has ended")
            self._orphan()

    def _arrange_sockets(self) -> None:
        wanted = listeners.listeners(self.fleet)
        self.sockets -= self.sockets - wanted.keys() - self.reserved
        refused = {it for it in wanted.keys() - self.sockets if not self._bind(it)}
        for server in self.fleet.servers.values() if refused else ():
            if server.address in refused and server.worker is None:
                self._queue.append(Told(server.name, events.Block(_in_use())))

    def _bind(self, address: Address) -> bool:
        if not self.world.port_is_free(address.port):
            return False
        self.sockets.add(address)
        return True

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Spawn(name, launch, nonce):
                self._spawn(name, launch, nonce)
            case events.SendDrain(name, launch):
                if process := self._process(name, launch):
                    self._judge_end(process, "drained")
                    process.draining_since = self.world.now
                    finished = self.world.rng.uniform(0, 1.5 * DRAIN_S)
                    if not process.deaf:
                        self.world.after(finished, self._gone, process, 0)
            case events.SendLive(name, launch):
                if process := self._process(name, launch):
                    server = self.fleet.servers[name]
                    prepared = self._sections[name, server.spec_hash]
                    process.label = int(prepared.spec.labels["label"])
            case events.SendSignal(name, launch, signal):
                self._signal(name, launch, signal)
            case events.Recheck(name):
                self._recheck(name)
            case _:
                assert_never(effect)

    def _process(self, name: str, launch: int) -> Process | None:
        nonce = self._nonce(name, launch)
        return next((it for it in self.world.alive() if it.nonce == nonce), None)

    def _signal(self, name: str, launch: int, signal: events.Signal) -> None:
        process = self._process(name, launch)
        if process is None:
            return
        now = self.world.now
        if signal == "TERM":
            self._judge_end(process, "terminated")
            drained = process.draining_since
            if drained is not None and not process.hurried and now < drained + DRAIN_S - 1e-6:
                raise BrokenError(f"{name} was terminated before its drain had ended")
            process.term_at = now
            if not process.deaf:
                self.world.after(self.world.rng.uniform(0, 2.0), self._gone, process, -15)
        else:
            if process.term_at is None or now < process.term_at + GRACE_S - 1e-6:
                raise BrokenError(f"{name} was killed before its grace had ended")
            self._gone(process, -9)

    def _judge_end(self, process: Process, how: str) -> None:
        """Nothing that runs well is ended unless somebody asked for it."""
        touched = self.accounts[process.name].touch > process.touch
        if not (touched or process.faulty or process.hung or self.fleet.closing):
            raise BrokenError(f"{process.name}#{process.launch} is {how}, and nobody asked for it")

    def _recheck(self, name: str) -> None:
        server = self.fleet.servers[name]
        self.accounts[name].free_retries += 1
        if server.cause is None or server.cause.code != "port_in_use":
            self.world.after(0.01, self.look_for_files)
        elif self.world.port_is_free(server.address.port):
            self._queue.append(Told(name, events.Unblock()))
        else:
            self._queue.append(Told(name, events.Block(_in_use())))

    def look_for_files(self) -> None:
        """As `Configuration` does it: let servers start whose files have appeared."""
        if not self.alive or self.frozen:
            return
        found = {
            name: prepared_server(entry, name in self.world.missing)
            for name, entry in self.accepted.by_name().items()
        }
        freed = edits.freed(found, self.applied.servers, self.fleet)
        if freed:
            servers = {**self.applied.servers, **{it.name: it for it in freed}}
            awakened = edits.awakened(freed, self.fleet, self.desired_of)
            for server in awakened:
                self.accounts[server.name].free_retries += 1
            self._submit(replace(self.applied, servers=servers), awakened)

    def _spawn(self, name: str, launch: int, nonce: str) -> None:
        world, server = self.world, self.fleet.servers[name]
        prepared = self._sections[name, server.spec_hash]
        cause = edits.cause(prepared)
        if cause is None and server.address not in self.sockets:
            cause = _in_use()
        if cause is not None:
            self._queue.append(Told(name, events.SpawnFailed(launch, cause, 0.0)))
            return
        self._judge_launch(name, launch)
        process = world.start_process(
            name,
            launch,
            nonce,
            server.spec_hash,
            server.address.port,
            int(prepared.spec.labels["label"]),
            self.accounts[name].touch,
        )
        self.disk.register[name] = process.pid
        self.disk.launches[name] = launch
        spawned = Told(name, events.Spawned(launch, process.pid))
        if world.chance(0.2):  # something else is before it in the queue
            world.after(0.001, self.deliver, spawned)
        else:
            self._queue.append(spawned)
        Life(self, process, bad=server.spec_hash.endswith("bad")).begin()

    def _judge_launch(self, name: str, launch: int) -> None:
        now, account = self.world.now, self.accounts.setdefault(name, Account())
        if launch <= account.last_launch:
            raise BrokenError(f"{name} was launched as number {launch} twice")
        account.last_launch = launch
        for other in self.world.alive():
            if other.name == name:
                raise BrokenError(f"{name} has two processes")
            if other.port == self.fleet.servers[name].address.port:
                raise BrokenError(f"{name} and {other.name} share a port")
        workers = [it.worker for it in self.fleet.servers.values() if it.worker is not None]
        if sum(it.held_bytes for it in workers) > BUDGET:
            raise BrokenError(f"{name} was launched into memory that others hold")
        if account.free_retries:
            account.free_retries = 0
            return
        recent = [at for at in account.failures if now - at < WINDOW_S]
        if len(recent) > MAX_RESTARTS + 1:
            raise BrokenError(f"{name} was launched {len(recent)} times and nobody asked for it")
        if recent and now - account.ended_at < FIRST_BACKOFF_S * 0.8 - 0.1:
            raise BrokenError(f"{name} was launched again without a pause")
        account.failures.append(now)

    # readings, as Configuration has them

    def put(self, event: intake.Event) -> None:
        """Let intake decide about *event*, and do it."""
        if not self.alive:
            return
        facts = intake.Facts(self.applied, self.fleet, self.desired_of)
        self.intake, effects = intake.step(self.intake, event, facts, self.world.now)
        for effect in effects:
            self._follow(effect)

    def _follow(self, effect: intake.Effect) -> None:
        world = self.world
        match effect:
            case intake.Read() | intake.Compare():
                seen = world.look()
                answer = intake.Arrived if isinstance(effect, intake.Read) else intake.Compared
                world.after(world.rng.uniform(0, 0.4), self._read, seen, answer)
            case intake.Refuse(problems):
                world.note(f"refused: {problems[0].message}")
            case intake.Apply():
                self._put_in_force(effect)
            case intake.Keep() | intake.Doubt() | intake.Show():
                world.note(type(effect).__name__.lower())
            case _:
                assert_never(effect)

    def _read(self, seen: intake.Look, answer: type[intake.Arrived | intake.Compared]) -> None:
        if not self.alive:
            return
        if not self.intake.rested:
            self.excused.add(self.world.identity)  # whoever asks takes the file as it is
        reading = replace(self._reading(seen), still=self.world.look() == seen)
        self.world.after(self.world.rng.uniform(0, 0.3), self._arrive, answer(reading))

    def _arrive(self, event: intake.Event) -> None:
        if self.frozen:
            self.world.after(0.5, self._arrive, event)
        else:
            self.put(event)

    def _reading(self, seen: intake.Look) -> intake.Reading:
        text = self.world.text
        if text is None or not text.valid:
            why = "no file" if text is None else "broken" if text.broken else "two share a port"
            return intake.Reading(seen, problems=(Problem("servers.yaml", 1, 1, "", why),))
        prepared = self._prepared(text)
        loaded = configurations.loaded(prepared)
        if prepared.content_hash == self.applied.content_hash:
            return intake.Reading(seen, loaded=loaded)
        self._texts[prepared.content_hash] = text
        return intake.Reading(seen, loaded=loaded, prepared=prepared)

    def _prepared(self, text: Text) -> Prepared:
        servers = [prepared_server(it, it.name in self.world.missing) for it in text.entries]
        keys = {
            "max_parallel_loads": text.parallel,
            "reload": self.mode,
            "memory_budget": BUDGET,
        }
        daemon = DaemonSpec().model_copy(update=keys)
        content = f"{text.parallel} {text.entries}"
        return configurations.prepared(*servers, content=content, daemon=daemon)

    def _put_in_force(self, edit: intake.Apply) -> None:
        text = self._texts[edit.prepared.content_hash]
        starting = edits.to_run(edit.steps, self.desired_of)
        for server in edits.newly_addressed(starting, self.applied.servers):
            address = edits.address(server)
            if all(held.port != address.port for held in self.sockets):
                if not self._bind(address):
                    self.reserved.clear()
                    self._arrange_sockets()
                    self.world.note(f"refused: port {address.port} is in use")
                    return
                self.reserved.add(address)
        half = text.partial and text.entries != self.accepted.entries
        if half and text.number not in self.excused:
            raise BrokenError("half of a file was applied")
        before = self.applied.servers
        self._accept(text)
        self._submit(
            edit.prepared,
            edits.changes(edit.steps, before, edit.prepared.servers, self.desired_of),
        )
        self.reserved.clear()
        for name in before.keys() - edit.prepared.servers.keys():
            self.disk.desired.pop(name, None)

    def _accept(self, text: Text) -> None:
        """The world's own account of what an accepted text changes."""
        before, after = self.accepted.by_name(), text.by_name()
        for name in before.keys() | after.keys():
            old, new = before.get(name), after.get(name)
            self.accounts.setdefault(name, Account())
            if _concerns(old, new) or (old != new and name in plan.diverged(self.fleet)):
                self.touch(name)
        self.accepted = text
        self.disk.last_good = text
        self.world.note(f"accepted edit {text.number}")

    def touch(self, name: str) -> None:
        """Somebody asks for something that may end or launch workers of *name*."""
        account = self.accounts.setdefault(name, Account())
        account.touch += 1
        account.failures.clear()
        account.free_retries = 1
        account.went_back = False

    def _submit(
        self, applied: Prepared, changes: Sequence[plan.Remove | plan.Put | plan.Adjust]
    ) -> None:
        self.applied = applied
        self._sections |= {(it.name, it.spec_hash): it for it in applied.servers.values()}
        parallel = applied.daemon.max_parallel_loads
        self.deliver(plan.Apply(tuple(changes), parallel, applied.budget_bytes))

    def desired_of(self, server: PreparedServer) -> Desired:
        if not server.spec.enabled:
            return Desired.STOPPED
        own = Desired.RUNNING if server.spec.autostart else Desired.STOPPED
        return self.disk.desired.get(server.name, own)

    # users

    def command(self, name: str, event: events.Start | events.Stop | events.Restart) -> None:
        """`tqd start`, `stop` or `restart`."""
        server = self.fleet.servers.get(name)
        known = server is not None and name not in self.fleet.removed
        if self.frozen or self.fleet.closing or not known:
            return
        if not isinstance(event, events.Stop):
            self.look_for_files()
            if server is None or not server.spec.enabled:
                return
        self.world.note(f"tqd {type(event).__name__.lower()} {name}")
        stop = isinstance(event, events.Stop)
        self.disk.desired[name] = Desired.STOPPED if stop else Desired.RUNNING
        self.touch(name)
        self.deliver(Told(name, event))

    def ask(self) -> None:
        """`tqd reload`."""
        if not self.frozen:
            self.world.note("tqd reload")
            self.put(intake.Asked())


class Life:
    """What becomes of one worker."""

    def __init__(self, daemon: Daemon, process: Process, bad: bool) -> None:
        self.daemon = daemon
        self.world = daemon.world
        self.process = process
        self.bad = bad

    def begin(self) -> None:
        world, process = self.world, self.process
        process.deaf = world.chance(0.05)
        rng = world.rng
        if world.chance(0.03):
            process.faulty = True  # silent
            return
        world.after(rng.uniform(0.05, 1.0), self._hello, world.chance(0.02))

    def _say(self, event: events.Event) -> None:
        if self.process.alive and self.process.orphaned_at is None and self.daemon.alive:
            self.daemon.deliver(Told(self.process.name, event))

    def _hello(self, lies: bool) -> None:
        process, world = self.process, self.world
        process.faulty = process.faulty or lies
        self._say(events.Hello(process.launch, "other" if lies else process.nonce, 1))
        load_s = world.rng.choice([0.5, 2.0, 5.0, 30.0 if world.faults else 5.0])
        fate = world.rng.random()
        if self.bad:
            code = _ENDS_OF_BAD[int(process.spec_hash.split("-")[2]) % len(_ENDS_OF_BAD)]
            world.after(world.rng.uniform(0, 2.0), self.daemon._gone, process, code)
        elif world.faults and fate < 0.05:
            process.faulty = True  # hangs while loading
        elif world.faults and fate < 0.15:
            process.faulty = True  # no progress before the end
            code = world.rng.choice([1, 1, 0, 66, 69, 70, 78, -9, -11])
            world.after(load_s * world.rng.random(), self.daemon._gone, process, code)
        else:
            self._load(load_s, 0.0)

    def _load(self, load_s: float, done: float) -> None:
        process = self.process
        if not process.alive:
            return
        if done >= load_s:
            process.ready_at = self.world.now
            self._say(events.Ready(process.launch, process.nonce, process.spec_hash))
            self._serve()
            return
        self._say(events.Progress(process.launch, "weights", done / load_s))
        step = min(5.0, load_s - done)
        self.world.after(step, self._load, load_s, done + step)

    def _serve(self) -> None:
        victim = self.world.over_memory() if self.world.faults else None
        if victim is not None:
            self.world.note("out of memory")
            self.daemon._gone(victim, -9)
        if self.world.chance(0.15):
            self.world.after(self.world.rng.expovariate(1 / 20), self._crash)
        self._beat()

    def _crash(self) -> None:
        if self.world.faults:
            self.daemon._gone(self.process, self.world.rng.choice([1, 70, -9, -11]))

    def _beat(self) -> None:
        process = self.process
        if not process.alive or process.orphaned_at is not None:
            return
        if not process.hung:
            process.hung = self.world.chance(0.01)
            process.generation += 1
            self._say(events.Beat(process.launch, process.generation))
            self.world.after(4.0, self._beat)


_ENDS_OF_BAD = (1, 78, -9, 0, 1)


def _concerns(old: Entry | None, new: Entry | None) -> bool:
    """Whether an edit from *old* to *new* may end or launch a worker."""
    if old is None or new is None:
        return True
    starts = new.autostart and not old.autostart
    return starts or old.spec_hash != new.spec_hash or old.enabled != new.enabled


def _in_use() -> Cause:
    return Cause("port_in_use", "in use")
