"""Carry out what is decided about workers, and report back what becomes of them."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import assert_never

from daemon.config import wire
from daemon.log import get_logger
from daemon.supervisor import environment, events
from daemon.supervisor.exits import TAIL_LINES
from daemon.supervisor.leftovers import Register
from daemon.supervisor.logs import LogWriter, Tail
from daemon.supervisor.process import Child, Message
from daemon.supervisor.rounds import Rounds
from daemon.supervisor.server import Cause

Post = Callable[[str, events.Event], None]


@dataclass(slots=True)
class Report:
    """What the newest worker of a server has said; it stays when the worker is gone."""

    launch: int
    ready: wire.Ready | None = None
    snapshot: wire.Snapshot | None = None
    sampled_at: float | None = None
    counted: wire.Snapshot | None = None
    """The newest snapshot, be it of the worker before: its counters stay until there are newer ones."""
    requests: wire.RequestCounts | None = None
    """The newest counts of requests; these stay likewise."""

    def sample(self, snapshot: wire.Snapshot, now: float) -> None:
        """Take in what the worker tells about this moment."""
        self.snapshot = self.counted = snapshot
        self.sampled_at = now
        self.requests = snapshot.requests or self.requests

    def copy(self) -> Report:
        """Return what was said until now; `dataclasses.replace` takes five times as long."""
        return Report(
            self.launch, self.ready, self.snapshot, self.sampled_at, self.counted, self.requests
        )


class Workers:
    """The processes of all servers. *post* takes what happens to them, from the event loop."""

    def __init__(
        self,
        *,
        tasks: asyncio.TaskGroup,
        post: Post,
        register: Register,
        logs: LogWriter,
        environ: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        self.reports: dict[str, Report] = {}
        self._tasks = tasks
        self._post = post
        self._register = register
        self._logs = logs
        self._environ = environ
        self._clock = clock
        self._preload = environment.openblas()
        self._rounds = Rounds()
        self._children: dict[tuple[str, int], Child] = {}
        self._log = get_logger()
        if self._preload is None and environment.computes_on_cpu():
            self._log.warning("blas.missing", hint=environment.OPENBLAS_HINT)

    def spawn(self, spec: wire.WorkerSpec, listener: socket.socket, log_path: Path) -> None:
        """Start a worker that serves on *listener*; `Spawned` or `SpawnFailed` follows."""
        server = spec.server
        command = environment.worker_command(server, self._environ)
        try:
            child = Child.spawn(
                command,
                environment.worker_environment(server, self._environ, preload=self._preload),
                spec,
                listener,
            )
        except OSError as error:
            message = f"cannot start {command[0]}: {error.strerror}"
            self.refuse(spec.name, spec.launch, Cause("spawn_failed", message))
            return
        self._register.add(spec.name, child.pid, spec.nonce, spec.launch)
        self._children[spec.name, spec.launch] = child
        before = self.reports.get(spec.name, Report(spec.launch))
        report = Report(spec.launch, counted=before.counted, requests=before.requests)
        self.reports[spec.name] = report
        self._log.info(
            "worker.started",
            server=spec.name,
            launch=spec.launch,
            pid=child.pid,
            spec_hash=spec.spec_hash,
        )
        self._logs.mark(log_path, f"launch {spec.launch} pid {child.pid} spec {spec.spec_hash}")
        self._post(spec.name, events.Spawned(spec.launch, child.pid))
        desk = _Desk(
            spec.launch,
            report,
            post=partial(self._post, spec.name),
            write=partial(self._logs.write, log_path),
            clock=self._clock,
        )
        self._tasks.create_task(self._attend(child, desk, log_path), name=f"worker {spec.name}")

    def refuse(self, name: str, launch: int, cause: Cause) -> None:
        """Report that a launch did not come to be."""
        self._post(name, events.SpawnFailed(launch, cause, _jitter()))

    def send(self, name: str, launch: int, message: wire.Message) -> None:
        """Say *message* to a worker, if it still lives."""
        if child := self._children.get((name, launch)):
            child.send(message)

    def signal(self, name: str, launch: int, signal: events.Signal) -> None:
        """Send TERM to a worker, or KILL to its group, if it still lives."""
        child = self._children.get((name, launch))
        if child is None:
            return
        if signal == "TERM":
            self._log.info("worker.signalled", server=name, pid=child.pid, signal=signal)
            child.terminate()
        else:
            self._log.error("worker.killed", server=name, pid=child.pid)
            child.kill()

    def log_bytes_dropped(self, log_path: Path) -> int:
        """Return how much output of the log at *log_path* was lost."""
        return self._logs.dropped_bytes(log_path)

    async def _attend(self, child: Child, desk: _Desk, log_path: Path) -> None:
        spec = child.spec
        code = await child.attend(desk, self._rounds)
        del self._children[spec.name, spec.launch]
        self._register.drop(child.pid)
        how = f"signal {-code}" if code < 0 else f"code {code}"
        self._logs.mark(log_path, f"launch {spec.launch} pid {child.pid} ended with {how}")
        fatal = desk.fatal
        self._post(
            spec.name,
            events.Exited(
                spec.launch,
                code,
                tail=tuple(desk.tail),
                fatal=fatal.message if fatal else None,
                hint=fatal.hint if fatal else None,
                jitter=_jitter(),
            ),
        )


class _Desk:
    """Where one worker's messages and output arrive."""

    def __init__(
        self,
        launch: int,
        report: Report,
        post: Callable[[events.Event], None],
        write: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self.tail = Tail(TAIL_LINES)
        self.fatal: wire.Fatal | None = None
        self._launch = launch
        self._report = report
        self._post = post
        self._write = write
        self._clock = clock

    def message(self, message: Message) -> None:
        report, launch = self._report, self._launch
        match message:
            case wire.Hello(nonce=nonce, protocol=protocol):
                self._post(events.Hello(launch, nonce, protocol))
            case wire.Progress(stage=stage, fraction=fraction):
                self._post(events.Progress(launch, stage, fraction))
            case wire.Ready(nonce=nonce, spec_hash=spec_hash):
                report.ready = message
                self._post(events.Ready(launch, nonce, spec_hash))
            case wire.Snapshot(generation=generation):
                report.sample(message, self._clock())
                self._post(events.Beat(launch, generation, message.memory_promised_bytes))
            case wire.Ack():
                pass
            case wire.Fatal():
                self.fatal = message
            case _:
                assert_never(message)

    def garbled(self, problem: str) -> None:
        self._post(events.Garbled(self._launch, problem))

    def output(self, data: bytes) -> None:
        self.tail.feed(data)
        self._write(data)


def _jitter() -> float:
    return random.uniform(-1.0, 1.0)
