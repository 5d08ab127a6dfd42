"""What a running daemon answers to the command line and to the ops endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from daemon.config import diff as differ
from daemon.config.spec import DaemonSpec
from daemon.errors import ConfigError, Problem, TqdError, UnknownServerError
from daemon.log import get_logger
from daemon.metrics.exposition import Page
from daemon.ops.applied import AppliedConfig, applied
from daemon.ops.document import OpenRequests, ServerStatus
from daemon.ops.events import EventLog, EventPage
from daemon.ops.history import History, HistoryDocument, Transition
from daemon.ops.metrics import metrics
from daemon.ops.server_status import open_requests, server_status
from daemon.ops.status import unready
from daemon.ops.view import View
from daemon.ops.written import Writer, Written
from daemon.paths import StateDir
from daemon.supervisor import environment, events, plan
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.gauge import Gauge
from daemon.supervisor.messages import Action, Change, Verdict
from daemon.supervisor.reconcile import Reconciler
from daemon.supervisor.reload import Configuration
from daemon.supervisor.server import Desired, Server

CLOCK_STEP_S = 0.5  # the wall clock was set, or the machine slept

_EVENTS: Mapping[Action, events.Event] = {
    "start": events.Start(),
    "stop": events.Stop(),
    "restart": events.Restart(),
}


class DaemonCommands:
    """Commands and questions, put to the parts of one daemon."""

    def __init__(
        self,
        *,
        state: StateDir,
        clock: Callable[[], float],
        reconciler: Reconciler,
        configuration: Configuration,
        desired: DesiredState,
        gauge: Gauge,
        log_path: Callable[[str, DaemonSpec], Path],
        events: EventLog,
        history: History,
    ) -> None:
        self.status_endpoint: str | None = None
        self.status_endpoint_error: str | None = None
        self._state = state
        self._clock = clock
        self._reconciler = reconciler
        self._configuration = configuration
        self._desired = desired
        self._gauge = gauge
        self._log_path = log_path
        self._events = events
        self._history = history
        self._writer = Writer()
        self._epoch = time.time() - clock()  # when the clock stood at 0
        self._version = importlib.metadata.version("tqd")
        self._mlx_version = importlib.metadata.version("mlx")
        self._backend = environment.backend()
        self._started = clock()
        self._log = get_logger()

    def status(self) -> Written:
        """Return the status document."""
        return self._writer.write(self._view())

    def server(self, name: str) -> ServerStatus | None:
        """Return the part of the status document about one server."""
        server = self._reconciler.fleet.servers.get(name)
        return None if server is None else server_status(self._view(), server)

    def requests(self, name: str) -> OpenRequests | None:
        """Return the open requests of server *name*."""
        server = self._reconciler.fleet.servers.get(name)
        return None if server is None else open_requests(self._view(), server)

    def unready(self, names: list[str] | None) -> dict[str, str]:
        """Return why servers are not ready, by name; of *names*, or of all that are meant to run."""
        return unready(self._reconciler.fleet, names)

    def config(self) -> AppliedConfig:
        """Return the configuration in force."""
        return applied(self._configuration.loaded, self._configuration.status.generation)

    def history(self) -> HistoryDocument:
        """Return the last changes of every server, and the last reloads."""
        return self._history.document()

    def server_history(self, name: str) -> Sequence[Transition]:
        """Return the last changes of server *name*."""
        return self._history.server(name)

    async def events(self, after: str | None, wait_s: float) -> EventPage:
        """Return what happened after the event *after*, or all that is kept; wait for it if need be."""
        seq = 0 if after is None else self._events.seq_of(after)
        if seq is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._events.wait(seq)
        batch = self._events.after(seq)
        missed = batch.missed and after is not None
        return {"last": self._events.last_id, "missed": missed, "events": batch.events}

    def metrics(self, page: Page) -> Iterator[None]:
        """Fill the metrics page, a little at each step."""
        return metrics(self._view(), page)

    async def act(self, action: Action, names: Sequence[str] | None) -> Mapping[str, int]:
        """Start, stop or restart *names*, or all that are enabled; return the launch each had before."""
        if self._reconciler.fleet.closing:
            raise TqdError("the daemon is shutting down", hint="`tqd start` once it has ended")
        if action != "stop":
            await self._configuration.look_for_files()  # some may have appeared since
        servers = self._servers(action, names)
        if action == "restart":
            self._refuse_pending(servers)
            await self._refuse_lost(servers)
        said = Desired.STOPPED if action == "stop" else Desired.RUNNING
        self._desired.say([server.name for server in servers], said)
        for server in servers:
            await self._reconciler.submit(plan.Told(server.name, _EVENTS[action]))
        return {server.name: server.launches for server in servers}

    async def reload(self) -> Verdict:
        """Read the configuration again and apply it."""
        done = await self._configuration.reload()
        return {
            "result": "unchanged" if done.result == "noop" else "applied",
            "steps": [_change(step) for step in done.steps],
            "warnings": [str(it) for it in done.warnings],
        }

    async def diff(self) -> Sequence[Change]:
        """Return what `reload` would do."""
        return [_change(step) for step in await self._configuration.diff()]

    def shut_down(self) -> None:
        """Begin to end the daemon; a second time, stop waiting for running requests."""
        closing = self._reconciler.fleet.closing
        self._log.info("daemon.stopping", hastened=closing)
        self._reconciler.tell(plan.Hasten() if closing else plan.Close())

    def _servers(self, action: Action, names: Sequence[str] | None) -> list[Server]:
        fleet = self._reconciler.fleet
        known = {name: it for name, it in fleet.servers.items() if name not in fleet.removed}
        if names is None:
            return [server for server in known.values() if server.spec.enabled]
        for name in names:
            if name not in known:
                raise UnknownServerError.among(known, name, self._configuration.status.state)
            if action != "stop" and not known[name].spec.enabled:
                raise ConfigError([self._disabled(name)])
        return [known[name] for name in dict.fromkeys(names)]

    def _refuse_pending(self, servers: Sequence[Server]) -> None:
        """Refuse to restart what the file says otherwise by now: whoever asks may expect the newest."""
        names = {server.name for server in servers}
        pending = [str(it) for it in self._configuration.status.pending if it.name in names]
        if pending:
            raise TqdError(
                f"the file has changes that are not in force: {'; '.join(pending)}",
                hint="`tqd reload` applies them, and restarts what needs it",
            )

    async def _refuse_lost(self, servers: Sequence[Server]) -> None:
        """Refuse to end what could not start again."""
        lost = await self._configuration.lost()
        if problems := [lost[server.name] for server in servers if server.name in lost]:
            raise ConfigError(problems)

    def _disabled(self, name: str) -> Problem:
        return Problem(
            file=str(self._configuration.status.path),
            line=0,
            col=0,
            path=f"servers.{name}.enabled",
            message="the server is disabled",
            hint="write `enabled: true` to run it",
        )

    def _view(self) -> View:
        reconciler, now = self._reconciler, self._clock()
        daemon = reconciler.wanted.daemon
        epoch = self._epoch_at(now)
        return View(
            now=now,
            seq=self._events.seq,
            wall=lambda at: datetime.fromtimestamp(epoch + at, UTC),
            fleet=reconciler.fleet,
            prepared=reconciler.in_force(),
            reports=reconciler.workers.reports,
            machine=reconciler.wanted.machine,
            reading=self._gauge.reading,
            config=self._configuration.status,
            reload_mode=daemon.reload,
            desired_source=self._desired.source,
            log_path=lambda name: self._log_path(name, daemon),
            log_bytes_dropped=lambda name: reconciler.workers.log_bytes_dropped(
                self._log_path(name, daemon)
            ),
            counts=reconciler.counts,
            version=self._version,
            mlx_version=self._mlx_version,
            backend=self._backend,
            pid=os.getpid(),
            started=self._started,
            state_dir=self._state.root,
            status_endpoint=self.status_endpoint,
            status_endpoint_error=self.status_endpoint_error,
        )

    def _epoch_at(self, now: float) -> float:
        """Return when the clock stood at 0; the same each time, so that a moment is told the same each time."""
        epoch = time.time() - now
        if abs(epoch - self._epoch) > CLOCK_STEP_S:
            self._epoch = epoch
        return self._epoch


def _change(step: differ.Step) -> Change:
    return {
        "action": step.verb,
        "server": step.name,
        "changes": [str(change) for change in step.changes],
        "text": str(step),
    }
