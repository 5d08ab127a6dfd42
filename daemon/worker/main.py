"""The life of a worker process, from its arguments to its exit code.

Only light modules are imported here: the supervisor hears a hello before aiohttp and MLX are loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from daemon import log
from daemon.config.wire import CHANNEL_FD, LISTEN_FD, Fatal, Hello, WorkerSpec
from daemon.errors import WorkerExit, WorkerExitError
from daemon.worker.channel import Channel
from daemon.worker.process import die_with_parent, survive_broken_output

if TYPE_CHECKING:
    from daemon.worker.serving import LoadedEngine

_FLUSH_S = 2.0


class Loader(Protocol):
    """Loads the model of a spec and starts its engine; blocks, and runs on a thread of its own."""

    def __call__(
        self,
        spec: WorkerSpec,
        /,
        *,
        progress: Callable[[str, float], None],
        on_failure: Callable[[BaseException], None],
    ) -> LoadedEngine:
        """Return the running engine; *progress* and *on_failure* may be called from any thread.

        Raises:
            WorkerExitError: the model cannot be served.
        """
        ...


def main(arguments: Sequence[str] | None = None, *, loader: Loader | None = None) -> int:
    """Run one worker and return its exit code; *loader* stands in for the real engine in tests."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the supervisor to decide
    signal.signal(signal.SIGTERM, lambda *_: os._exit(WorkerExit.OK))  # nothing runs yet
    survive_broken_output()
    options = _parse(arguments)
    channel = Channel(socket.socket(fileno=options.channel_fd))
    try:
        return _run(channel, options.listen_fd, parent, loader or _start_engine)
    except WorkerExitError as error:
        channel.send(Fatal(code=error.code, message=error.message, hint=error.hint))
        sys.stderr.write(f"tqd worker: {error.message}\n")
        return error.code
    finally:
        channel.close(_FLUSH_S)
        sys.stderr.flush()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m daemon.worker", description="One worker of tqd; started by the supervisor."
    )
    parser.add_argument(
        "--channel-fd", type=int, default=CHANNEL_FD, help="socket to the supervisor"
    )
    parser.add_argument(
        "--listen-fd", type=int, default=LISTEN_FD, help="listening socket of the server"
    )
    return parser.parse_args(arguments)


def _run(channel: Channel, listen_fd: int, parent: int, loader: Loader) -> int:
    spec = channel.read_spec()
    if spec is None or not die_with_parent(parent):
        return WorkerExit.OK  # the supervisor ended while it started us
    log.configure(level=spec.log_level)
    channel.send(Hello(nonce=spec.nonce, pid=os.getpid()))
    from daemon.worker.serve import serve

    with socket.socket(fileno=listen_fd) as listener:
        return asyncio.run(serve(spec, channel, listener, loader))


def _start_engine(
    spec: WorkerSpec,
    /,
    *,
    progress: Callable[[str, float], None],
    on_failure: Callable[[BaseException], None],
) -> LoadedEngine:
    """Start the real engine; MLX is imported here, on the loading thread, and not before."""
    from daemon.worker.engine import start_engine

    return start_engine(spec, progress=progress, on_failure=on_failure)
