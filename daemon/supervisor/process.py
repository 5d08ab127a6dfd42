"""Run one worker: spawn it, talk to it, collect its output, signal it, reap it.

A worker gets one end of a socketpair (the channel, and the lease: end of file means that the daemon
is gone) and the server's listening socket, both by number on its command line, because ``pass_fds``
keeps numbers. Whatever it writes comes back through a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from pydantic import ValidationError

from daemon.config import wire
from daemon.supervisor.rounds import Rounds

MAX_MESSAGE = 4 * 2**20  # bytes of one line; a report on a thousand layers is far smaller
CHUNK = 65536
LAST_WORDS_S = 0.5  # how long after a worker's end its output is waited for

Message = wire.Hello | wire.Progress | wire.Ready | wire.Snapshot | wire.Ack | wire.Fatal


class Audience(Protocol):
    """Who wants to know what a worker does."""

    def message(self, message: Message) -> None:
        """The worker said *message*."""

    def garbled(self, problem: str) -> None:
        """The worker said something that is no message."""

    def output(self, data: bytes) -> None:
        """The worker wrote *data* to its stdout or stderr."""


class Child:
    """A spawned worker."""

    def __init__(
        self, spec: wire.WorkerSpec, process: subprocess.Popen[bytes], channel: socket.socket
    ) -> None:
        self.spec = spec
        self._process = process
        self._channel = channel
        self._writer: asyncio.StreamWriter | None = None
        self._outbox = [wire.encode(spec)]
        self._signals = threading.Lock()
        self._reaped = False

    @classmethod
    def spawn(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        spec: wire.WorkerSpec,
        listener: socket.socket,
    ) -> Child:
        """Start *command* as the leader of a process group of its own.

        The calling thread must live as long as the daemon: on Linux a worker asks to be terminated
        when the thread that spawned it ends (PR_SET_PDEATHSIG), not when the process does.

        Raises:
            OSError: there is no such program, or the system is out of processes.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [
                        *command,
                        *("--channel-fd", str(theirs.fileno())),
                        *("--listen-fd", str(listener.fileno())),
                    ],
                    env=dict(environment),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    pass_fds=(theirs.fileno(), listener.fileno()),
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        return cls(spec, process, ours)

    @property
    def pid(self) -> int:
        """The process id, which is its process group's too."""
        return self._process.pid

    def send(self, message: wire.Message) -> None:
        """Say *message*, in order, as soon as the worker listens."""
        line = wire.encode(message)
        if self._writer is None:
            self._outbox.append(line)
        elif not self._writer.is_closing():
            self._writer.write(line)

    def terminate(self) -> None:
        """Ask the worker to finish and exit."""
        with self._signals:
            if not self._reaped:
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the worker and whatever it started."""
        with self._signals:
            if not self._reaped:
                _kill_group(self.pid)

    async def attend(self, audience: Audience, rounds: Rounds) -> int:
        """Pass on what the worker says and writes until it has ended; return its exit code.

        The code is negative for a signal. What the worker leaves behind in its group is killed. After a
        snapshot the next message waits for one of *rounds*.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._channel, limit=MAX_MESSAGE)
        self._writer.writelines(self._outbox)
        try:
            async with asyncio.TaskGroup() as tasks:
                last_words = {
                    tasks.create_task(self._listen(reader, self._writer, audience, rounds)),
                    tasks.create_task(self._collect(audience)),
                }
                code = await self._ended()
                rounds.leave(self._channel)
                _, unfinished = await asyncio.wait(last_words, timeout=LAST_WORDS_S)
                for task in unfinished:
                    task.cancel()
        finally:
            self._writer.close()
        return code

    async def _listen(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        audience: Audience,
        rounds: Rounds,
    ) -> None:
        transport = cast("asyncio.Transport", writer.transport)  # of a socket: it reads too
        try:
            while line := await reader.readline():
                message = wire.from_worker.validate_json(line)
                audience.message(message)
                if isinstance(message, wire.Snapshot) and not self._reaped:
                    rounds.put_off(self._channel, transport)
        except ValidationError as error:
            audience.garbled(f"{error.error_count()} problems in a message")
        except ValueError:
            audience.garbled(f"a message of more than {MAX_MESSAGE} bytes")
        except ConnectionError:
            return  # the process is ending; its exit code says more
        finally:
            rounds.leave(self._channel)

    async def _collect(self, audience: Audience) -> None:
        pipe = self._process.stdout
        reader = asyncio.StreamReader(limit=CHUNK)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while data := await reader.read(CHUNK):
                audience.output(data)
        finally:
            transport.close()

    async def _ended(self) -> int:
        """Return the exit code once the process is reaped; a thread of its own does the waiting."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(code: int) -> None:
            if not ended.done():
                ended.set_result(code)

        def wait() -> None:
            _until_ended(self.pid)
            with self._signals:
                _kill_group(self.pid)  # before reaping: until then nobody else can have this id
                code = self._process.wait()
                self._reaped = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(tell, code)

        threading.Thread(target=wait, name=f"tqd-wait-{self.pid}", daemon=True).start()
        return await ended


def _until_ended(pid: int) -> None:
    """Wait until our child *pid* has ended, without reaping it."""
    if sys.platform == "darwin":
        change = select.kevent(
            pid,
            filter=select.KQ_FILTER_PROC,
            flags=select.KQ_EV_ADD | select.KQ_EV_ONESHOT,
            fflags=select.KQ_NOTE_EXIT,
        )
        with contextlib.closing(select.kqueue()) as queue, contextlib.suppress(ProcessLookupError):
            queue.control([change], 1)
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _kill_group(pid: int) -> None:
    # macOS says EPERM when only a zombie is left of the group
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
