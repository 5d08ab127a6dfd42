"""One random history: things happen to a simulated daemon, then the world calms down.

Everything follows from the seed. After every step the invariants hold, or `BrokenError` says which one
does not and what led there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from daemon.supervisor import events, plan
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import Desired, State
from tests.simulation.actor import Account, Daemon, Disk
from tests.simulation.world import PORTS, BrokenError, Entry, Fate, Text, World

NAMES = ("a", "b", "c", "d", "e")
STEPS = 40
FITTING = 4  # servers that have room together
CALM_S = 120.0
TRACE_LINES = 60


def run(seed: int, steps: int = STEPS) -> Counter[str]:
    """Live through history *seed*; return what happened how often.

    Raises:
        BrokenError: an invariant does not hold; the message replays it.
    """
    history = History(seed)
    try:
        history.live(steps)
        history.calm_down()
    except Exception as error:
        last = "\n".join(history.world.trace[-TRACE_LINES:])
        raise BrokenError(f"{error}\nTQD_SIM_SEED={seed} replays it:\n{last}") from error
    return history.happened


class History:
    """A world, a daemon that may die and come back, and the hand of chance."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.rng = self.world.rng
        self.disk = Disk()
        self.accounts: dict[str, Account] = {}
        self.happened: Counter[str] = Counter()
        self._boots = 0
        self._version = 0
        self.world.write(Text(self._some_entries()))
        self.daemon = self._boot()

    def live(self, steps: int) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self._edit, 12), (self._save_badly, 3), (self._save_in_parts, 5), (self._empty_briefly, 2),
            (self._delete_and_create, 2), (self._user_commands, 6), (self._ask_for_reload, 2),
            (self._kill_a_worker, 3), (self._hang_a_worker, 2), (self._steal_a_port, 2), (self._lose_a_model, 2),
            (self._sleep, 2), (self._freeze, 1), (self._kill_the_daemon, 2), (self._shut_down, 1),
            (self._boot_again, 6),
        ]  # fmt: skip
        chosen = self.rng.choices(
            [act for act, _ in actions], [weight for _, weight in actions], k=steps
        )
        for act in chosen:
            self._run_for(self.rng.choice([0.0, 0.05, 0.5, 2.0, 8.0]) * self.rng.random() * 2)
            self.happened[act.__name__.strip("_")] += 1
            act()
            self._check()

    def calm_down(self) -> None:
        """No more faults: in the end everything is as the file says."""
        world = self.world
        world.faults = False
        self._run_for(60.0)  # what was begun comes to its end
        world.thieves.clear()
        world.missing.clear()
        for process in world.alive():
            process.deaf = False
        entries = self._some_entries()[:FITTING]
        accepted = self.daemon.accepted
        fits = sum(it.enabled for it in accepted.entries) <= FITTING
        if self.daemon.alive and fits and self.rng.random() < 0.5:
            entries = accepted.entries
        world.write(Text(entries))
        world.note("calm")
        self._run_for(20.0)
        if not self.daemon.alive:
            self.daemon = self._boot()
        self._run_for(10.0)
        self.daemon.ask()
        self._run_for(CALM_S)
        self._check_calm(failed_may_stay=True)
        for name in list(self.daemon.fleet.servers):
            self.daemon.command(name, events.Start())
        self._run_for(CALM_S)
        self._check_calm(failed_may_stay=False)

    # time

    def _run_for(self, seconds: float) -> None:
        world, until = self.world, self.world.now + seconds
        while (at := min(world.next_at(), self.daemon.next_at())) <= until:
            if self.daemon.next_at() <= world.next_at():
                world.now = max(world.now, at)
                self.daemon.pass_time()
            else:
                world.happen()
            self._check()
        world.now = max(world.now, until)

    # what happens

    def _some_entries(self) -> tuple[Entry, ...]:
        names = self.rng.sample(NAMES, self.rng.randint(1, len(NAMES)))
        ports = self.rng.sample(PORTS, len(names))
        return tuple(
            Entry(name, port, self._next()) for name, port in zip(names, ports, strict=True)
        )

    def _next(self) -> int:
        self._version += 1
        return self._version

    def _newest(self) -> Text:
        text = self.world.text
        if text is None or not text.valid or text.partial:
            return self.daemon.accepted
        return text

    def _edited(self) -> Text:
        text = self._newest()
        entries = list(text.entries)
        if not entries or (self.rng.random() < 0.2 and len(entries) < len(NAMES)):
            name = self.rng.choice([it for it in NAMES if it not in text.by_name()] or ["a"])
            entries = [it for it in entries if it.name != name]
            free = [port for port in PORTS if all(it.port != port for it in entries)]
            fate: Fate = "bad" if self.rng.random() < 0.2 else "good"
            entries.append(Entry(name, self.rng.choice(free), self._next(), fate=fate))
            return replace(text, entries=tuple(entries), partial=False)
        at = self.rng.randrange(len(entries))
        entry = entries[at]
        match self.rng.choice("vvvllprbeasx"):
            case "v":
                entries[at] = replace(entry, version=self._next(), fate="good")
            case "l":
                entries[at] = replace(entry, label=self._next())
            case "p":
                free = [port for port in PORTS if all(it.port != port for it in entries)]
                entries[at] = replace(entry, port=self.rng.choice(free))
            case "r":
                del entries[at]
            case "b":
                entries[at] = replace(entry, version=self._next(), fate="bad")
            case "e":
                entries[at] = replace(entry, enabled=not entry.enabled)
            case "a":
                entries[at] = replace(entry, autostart=not entry.autostart)
            case "s":
                other = self.rng.randrange(len(entries))
                entries[at], entries[other] = (
                    replace(entries[at], port=entries[other].port),
                    replace(entries[other], port=entries[at].port),
                )
            case _:
                pass
        parallel = self.rng.choice([text.parallel, 1, 2, 3])
        return replace(text, entries=tuple(entries), parallel=parallel, partial=False)

    def _edit(self) -> None:
        self.world.write(self._edited())
        if self.rng.random() < 0.3:  # and saves again soon
            self.world.after(self.rng.uniform(0.2, 1.5), self._save_in_parts)

    def _save_badly(self) -> None:
        self.world.write(Text(broken=True))
        if self.rng.random() < 0.7:
            self.world.after(self.rng.uniform(0.1, 5), self.world.write, self._edited())

    def _save_in_parts(self) -> None:
        """An editor that writes in place: for a moment half of the file is there, and may be valid."""
        text = self._edited()
        kept = text.entries[: self.rng.randint(0, max(len(text.entries) - 1, 0))]
        half = replace(text, entries=kept, partial=True, broken=self.rng.random() < 0.3)
        self.world.write(half)
        self.world.after(self.rng.uniform(0.0, 0.25), self.world.write, text)

    def _empty_briefly(self) -> None:
        """A disk that is slow, or a script that thinks: the file is empty for some seconds."""
        half = Text((), partial=True)
        text = self._edited()
        self.world.write(half)
        self.world.after(self.rng.uniform(0.5, 4.0), self.world.write, text)

    def _delete_and_create(self) -> None:
        text = self._edited()
        self.world.write(None)
        self.world.after(self.rng.uniform(0.1, 5), self.world.write, text)

    def _user_commands(self) -> None:
        if not self.daemon.alive:
            return
        command = self.rng.choice([events.Start(), events.Stop(), events.Restart()])
        for name in self.rng.sample(NAMES, self.rng.choice([1, 1, len(NAMES)])):
            self.daemon.command(name, command)

    def _ask_for_reload(self) -> None:
        self.daemon.ask()

    def _kill_a_worker(self) -> None:
        if workers := [it for it in self.world.alive() if it.orphaned_at is None]:
            self.daemon._gone(self.rng.choice(workers), -9)

    def _hang_a_worker(self) -> None:
        if workers := [it for it in self.world.alive() if it.ready_at is not None]:
            self.rng.choice(workers).hung = True

    def _steal_a_port(self) -> None:
        port = self.rng.choice(PORTS)
        held = {it.port for it in self.daemon.sockets} if self.daemon.alive else set()
        if port not in held and self.world.port_is_free(port):
            self.world.note(f"port {port} is stolen")
            self.world.thieves.add(port)
            self.world.after(self.rng.uniform(1, 30), self.world.thieves.discard, port)

    def _lose_a_model(self) -> None:
        name = self.rng.choice(NAMES)
        self.world.note(f"the model of {name} is gone")
        self.world.missing.add(name)
        self.world.after(self.rng.uniform(1, 60), self.world.missing.discard, name)

    def _sleep(self) -> None:
        gap = self.rng.choice([3.0, 30.0, 3600.0])
        if self.daemon.alive and not self.daemon.frozen:
            self.daemon.sleep(gap)

    def _freeze(self) -> None:
        if self.daemon.alive and not self.daemon.frozen:
            self.daemon.freeze(self.rng.choice([2.0, 10.0, 40.0]))

    def _kill_the_daemon(self) -> None:
        if self.daemon.alive:
            self.daemon.die()
            self._later_boot()

    def _shut_down(self) -> None:
        if self.daemon.alive and not self.daemon.frozen:
            self.world.note("tqd shutdown")
            self.daemon.deliver(plan.Close())
            if self.rng.random() < 0.3:
                for process in self.world.alive():
                    process.hurried = True
                self.daemon.deliver(plan.Hasten())

    def _later_boot(self) -> None:
        self.world.after(self.rng.uniform(0.1, 10), self._boot_again)

    def _boot_again(self) -> None:
        if not self.daemon.alive:
            self.daemon = self._boot()

    def _boot(self) -> Daemon:
        self._boots += 1
        self.world.note(f"daemon {self._boots} starts")
        daemon = Daemon(self.world, self.disk, self.accounts, self._boots)
        self.daemon = daemon
        self.world.on_write = daemon.file_written
        daemon.start()
        return daemon

    # invariants

    def _check(self) -> None:
        fleet = self.daemon.fleet
        seen: set[str] = set()
        for process in self.world.alive():
            if process.name in seen:
                raise BrokenError(f"{process.name} has two processes")
            seen.add(process.name)
            if self.daemon.alive and not _is_known(fleet, process.name, process.nonce):
                raise BrokenError(f"{process.name}#{process.launch} is an orphan")
        if not self.daemon.alive:
            return
        for entry in self.daemon.accepted.entries:
            if entry.name not in fleet.servers or entry.name in fleet.removed:
                raise BrokenError(f"{entry.name} is in the file, and lost")
        for server in fleet.servers.values():
            if len(server.restarts) > server.spec.restart.max:
                raise BrokenError(f"{server.name} restarts without end")
            if server.worker is None and server.state not in _WITHOUT_WORKER:
                raise BrokenError(f"{server.name} is {server.state} without a worker")

    def _check_calm(self, *, failed_may_stay: bool) -> None:
        daemon, world = self.daemon, self.world
        wanted = self.world.text
        if not isinstance(wanted, Text) or daemon.accepted.entries != wanted.entries:
            raise BrokenError(f"the file was not applied: {daemon.accepted} is in force")
        fleet = daemon.fleet
        if set(fleet.servers) != set(wanted.by_name()):
            raise BrokenError(f"there are {sorted(fleet.servers)} instead of what the file has")
        processes = {it.name: it for it in world.alive()}
        for entry in wanted.entries:
            server = fleet.servers[entry.name]
            process = processes.pop(entry.name, None)
            desired = daemon.desired_of(daemon.applied.servers[entry.name])
            if failed_may_stay and not entry.autostart:
                continue  # a key about starts: it runs if it ran
            if desired is Desired.STOPPED:
                if server.state is not State.STOPPED or process is not None:
                    raise BrokenError(f"{entry.name} is {server.state}, and was to be stopped")
                continue
            if entry.fate == "bad":
                if server.divergence is None and server.state is State.READY:
                    raise BrokenError(f"{entry.name} is ready with a section that cannot load")
                continue
            if failed_may_stay and (server.state is State.FAILED or server.divergence):
                continue
            if failed_may_stay and server.state is State.STOPPED and server.cause is not None:
                continue  # its worker had ended without an error
            if server.divergence is not None and not failed_may_stay:
                daemon.command(entry.name, events.Restart())
                self._run_for(CALM_S)
                fleet = daemon.fleet
                server = fleet.servers[entry.name]
                process = next((it for it in world.alive() if it.name == entry.name), None)
            if server.state is not State.READY or process is None:
                raise BrokenError(f"{entry.name} is {server.state} in a calm world")
            if process.spec_hash != entry.spec_hash:
                raise BrokenError(f"{entry.name} runs {process.spec_hash}")
            if process.label != entry.label:
                raise BrokenError(f"{entry.name} was not told of a live change")
            if all(it.port != entry.port for it in daemon.sockets):
                raise BrokenError(f"nobody listens for {entry.name}")
        if strangers := [it for it in processes if it not in fleet.servers]:
            raise BrokenError(f"{strangers} still run")
        ports = {it.worker.address for it in fleet.servers.values() if it.worker is not None}
        idle = {it.address for it in fleet.servers.values() if it.state is State.BACKOFF}
        if not ports <= daemon.sockets <= ports | idle:
            raise BrokenError(f"sockets {daemon.sockets} are held for {ports}")


_WITHOUT_WORKER = (*(State.STOPPED, State.BLOCKED, State.STARTING, State.BACKOFF, State.FAILED),)


def _is_known(fleet: Fleet, name: str, nonce: str) -> bool:
    server = fleet.servers.get(name)
    if server is not None and server.worker is not None and server.worker.nonce == nonce:
        return True
    return name in fleet.leftovers
