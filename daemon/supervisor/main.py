"""The daemon: puts the parts together and runs until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

from daemon import log
from daemon.config.address import parse_endpoint
from daemon.config.spec import DaemonSpec
from daemon.ops.endpoint import StatusEndpoint
from daemon.ops.events import EventLog
from daemon.ops.history import History
from daemon.paths import StateDir
from daemon.service.notify import Notifier
from daemon.supervisor import environment, plan
from daemon.supervisor.commands import DaemonCommands
from daemon.supervisor.control import ControlSocket
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.gauge import Gauge
from daemon.supervisor.instance import Instance
from daemon.supervisor.leftovers import Identity, Register, see_out
from daemon.supervisor.logs import LogStream, LogWriter
from daemon.supervisor.reconcile import Reconciler
from daemon.supervisor.reload import Configuration
from daemon.supervisor.rotation import Rotation
from daemon.supervisor.server import Desired, State
from daemon.supervisor.sockets import Sockets
from daemon.supervisor.workers import Workers

STOP_EXTENSION_S = 30.0  # asked of systemd again and again while workers are on their way out
LEFTOVER_GRACE_S = 60.0  # for one whose entry is no longer in the file


@dataclass(frozen=True, slots=True)
class Options:
    """How the daemon was started. *log_file*: its log goes there instead of to stderr, and rotates."""

    config: Path
    state: StateDir
    log_file: Path | None = None


def run(options: Options) -> None:
    """Run the daemon until it is told to stop.

    Raises:
        AlreadyRunningError: the state folder has a daemon.
        ConfigError: the configuration is broken, and no last good one is known.
        TqdError: the control socket cannot be opened.
    """
    instance = Instance(options.state)
    instance.acquire()
    # never released by hand: whoever sees the lock free may rely on this process being gone
    daemon = _Daemon(options, instance)
    try:
        asyncio.run(daemon.serve())
    finally:
        daemon.close_logs()


class _Daemon:
    def __init__(self, options: Options, instance: Instance) -> None:
        self._state = options.state
        self._instance = instance
        self._environ = environment.inherited()
        self._notifier = Notifier(self._environ, pid=os.getpid())
        self._logs = LogWriter(_rotation(DaemonSpec()))
        own = options.log_file
        self._stream = None if own is None else LogStream(own, self._logs)
        self._configure_log(DaemonSpec())
        self._log = log.get_logger()
        self._register = Register(self._state.workers)
        self._earlier = self._register.earlier()
        self._sockets = Sockets(time.monotonic)
        self._events = EventLog()
        history = History(self._events, self._state.reloads, lambda: datetime.now(UTC))
        self._reconciler = Reconciler(
            sockets=self._sockets,
            profiles=self._state.profiles,
            log_path=self._log_path,
            clock=time.monotonic,
            leftovers={it.name: it.pid for it in self._earlier},
            launched=dict(self._register.launched),
            changed=history.fleet_changed,
            turned=self._turned,
            recheck=lambda: self._configuration.recheck(),
        )
        self._gauge = Gauge(self._reconciler)
        desired = DesiredState(self._state.desired)
        self._configuration = Configuration(
            options.config,
            state=self._state,
            environ=self._environ,
            reconciler=self._reconciler,
            sockets=self._sockets,
            desired=desired,
            clock=time.monotonic,
            busy=lambda busy: self._notifier.reloading() if busy else self._notifier.ready(),
            adopted=self._adopt,
            concluded=history.reloaded,
            waiting=history.pending,
        )
        self._commands = DaemonCommands(
            state=self._state,
            clock=time.monotonic,
            reconciler=self._reconciler,
            configuration=self._configuration,
            desired=desired,
            gauge=self._gauge,
            log_path=self._log_path,
            events=self._events,
            history=history,
        )

    async def serve(self) -> None:
        """Run until the last worker is gone after a stop."""
        self._handle_signals()
        daemon = await self._configuration.read_first()
        self._configure_log(daemon)
        path = Path(daemon.control) if daemon.control else self._state.socket
        control = ControlSocket(path, self._commands)
        control.bind()
        self._instance.announce(path)
        self._state.refused.unlink(missing_ok=True)
        self._log.info("daemon.started", pid=os.getpid(), state_dir=str(self._state.root))
        try:
            await self._run(control, daemon)
        finally:
            self._notifier.stopping()
            self._events.close()
            await control.close()
            self._log.info("daemon.stopped")

    def close_logs(self) -> None:
        """Write what is still on its way to the logs."""
        self._logs.close()

    async def _run(self, control: ControlSocket, daemon: DaemonSpec) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._reconciler.workers = Workers(
                tasks=tasks,
                post=self._reconciler.post,
                register=self._register,
                logs=self._logs,
                environ=self._environ,
                clock=time.monotonic,
            )
            reconciling = tasks.create_task(self._reconciler.run(), name="reconciler")
            await self._configuration.start_first()
            background = [
                tasks.create_task(self._configuration.run(), name="configuration"),
                tasks.create_task(self._gauge.run(), name="gauge"),
                *(tasks.create_task(self._see_out(it), name="left-over") for it in self._earlier),
            ]
            endpoint = await self._open_status(daemon)
            await control.serve()  # last: whoever gets an answer here finds the rest open
            self._notifier.ready()
            await reconciling
            for task in background:
                task.cancel()
            self._events.close()
            if endpoint is not None:
                await endpoint.close()

    async def _open_status(self, daemon: DaemonSpec) -> StatusEndpoint | None:
        """Open the ops endpoint; without it the daemon runs on, and says so."""
        if daemon.status is None:
            return None
        endpoint = StatusEndpoint(parse_endpoint(daemon.status), self._commands, self._events)
        try:
            await endpoint.open()
        except OSError as error:
            self._commands.status_endpoint_error = (
                f"cannot listen on {daemon.status}: {error.strerror}"
            )
            self._log.error("status.unavailable", address=daemon.status, error=error.strerror)
            return None
        self._commands.status_endpoint = f"http://{daemon.status}"
        return endpoint

    async def _see_out(self, identity: Identity) -> None:
        """Wait for a worker of an earlier daemon to end, and see to it."""
        self._register.keep(identity)
        self._log.warning("worker.leftover_found", server=identity.name, pid=identity.pid)
        server = self._reconciler.wanted.servers.get(identity.name)
        grace_s = server.spec.stop_grace if server else LEFTOVER_GRACE_S
        how = await see_out(identity, grace_s=grace_s)
        self._register.drop(identity.pid)
        self._log.info("worker.leftover_ended", server=identity.name, pid=identity.pid, how=how)
        await self._reconciler.submit(plan.LeftoverGone(identity.name))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._commands.shut_down)
        loop.add_signal_handler(signal.SIGHUP, self._configuration.ask)

    def _turned(self) -> None:
        """The reconciler has made progress: tell systemd."""
        if not self._notifier.listening:
            return
        fleet = self._reconciler.fleet
        self._notifier.turned()
        if fleet.closing:
            self._notifier.stopping()
            self._notifier.extend(STOP_EXTENSION_S)
        wanted = [it for it in fleet.servers.values() if it.desired is Desired.RUNNING]
        ready = sum(it.state is State.READY for it in wanted)
        self._notifier.status(f"{ready} of {len(wanted)} servers ready")

    def _adopt(self, daemon: DaemonSpec) -> None:
        self._logs.rotation = _rotation(daemon)
        self._configure_log(daemon)

    def _configure_log(self, daemon: DaemonSpec) -> None:
        stream = None if self._stream is None else cast("TextIO", self._stream)
        log.configure(level=daemon.log.level, fmt=daemon.log.format, stream=stream)

    def _log_path(self, name: str, daemon: DaemonSpec) -> Path:
        return self._state.server_log(name, Path(daemon.log.dir) if daemon.log.dir else None)


def _rotation(daemon: DaemonSpec) -> Rotation:
    return Rotation(daemon.log.max_size, daemon.log.backups)
