"""A real daemon with stub workers: real files, real sockets, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner, Result

from daemon.cli.main import main
from daemon.ops.document import ServerStatus
from daemon.paths import StateDir
from daemon.supervisor.client import Client
from tests.free_ports import free_port, is_free

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "stub_worker.py"
LONGEST_WAIT_S = 60.0  # nothing here takes a second on an idle machine; only a hang takes that long
LONGEST_LOAD_S = 240.0  # a real worker imports MLX

# Everything that a daemon waits for, short.
QUICK = {
    "restart": {"max": 2, "window": "60s", "backoff": ["200ms", "400ms"], "stable_after": "30s"},
    "drain_timeout": "3s",
    "stop_grace": "1s",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


def until(condition: Callable[[], Any], what: str, limit_s: float = LONGEST_WAIT_S) -> Any:
    """Return what *condition* returns as soon as that is true."""
    end = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.03)


def get(port: int) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as answer:
        return answer.code, json.loads(answer.read()), answer.headers


class Site:
    """A folder with a model, a servers.yaml and a state folder, and the daemon that runs from it."""

    until = staticmethod(until)
    get = staticmethod(get)
    is_free = staticmethod(is_free)
    free_port = staticmethod(free_port)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "servers.yaml"
        self.state = StateDir(folder / "state")
        self.client = Client(self.state)
        self.daemon: subprocess.Popen[bytes] | None = None
        self.servers: dict[str, dict[str, Any]] = {}
        self.status_port: int | None = None
        self.program = [sys.executable, "-m", "daemon"]
        self.environment = {
            **os.environ,  # noqa: TID251 - the environment of a child
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
            "TQD_WORKER_COMMAND": f"{sys.executable} {STUB}",
        }
        # the suite itself may run with a preloaded BLAS; a daemon never does, and gives it to workers only
        self.environment.pop("LD_PRELOAD", None)
        _write_model(folder / "model")

    def add(self, name: str, stub: str | None = None, **keys: Any) -> int:
        """Add a server to the next `text`; return its port."""
        env = {"STUB_NAME": name} | ({"STUB": stub} if stub else {}) | keys.pop("env", {})
        server = {"model": "./model", "port": free_port(), "env": env, **keys}
        self.servers[name] = server
        return int(server["port"])

    def text(self, **daemon: Any) -> str:
        status = None if self.status_port is None else f"127.0.0.1:{self.status_port}"
        document = {
            "version": 1,
            "daemon": {"status": status, "max_parallel_loads": 4, **daemon},
            "defaults": QUICK,
            "servers": self.servers,
        }
        return yaml.safe_dump(document, sort_keys=False)

    def write(self, text: str | None = None, **daemon: Any) -> None:
        """Write servers.yaml as most editors do: a new file under the old name."""
        temporary = self.file.with_suffix(".new")
        temporary.write_text(self.text(**daemon) if text is None else text)
        temporary.replace(self.file)

    def run(self, *arguments: str, wait: bool = True, **environment: str) -> None:
        """Start `tqd run` in the foreground of a process of its own."""
        if self.daemon is not None:
            self.daemon.wait(LONGEST_WAIT_S)  # the one before is on its way out
        log = (self.folder / "daemon.out").open("ab")
        with log:
            self.daemon = subprocess.Popen(
                self.command("run", *arguments),
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if wait:
            try:
                until(lambda: self.client.running() or self.daemon_ended(), "the daemon answers")
            except AssertionError as error:
                self.daemon.send_signal(signal.SIGABRT)  # a stack of every thread, where it hangs
                self.daemon.wait(LONGEST_WAIT_S)
                raise AssertionError(f"{error}; it wrote:\n{self.daemon_output()}") from error
            assert not self.daemon_ended(), f"the daemon ended:\n{self.daemon_output()}"

    def daemon_ended(self) -> bool:
        return self.daemon is not None and self.daemon.poll() is not None

    def daemon_output(self) -> str:
        return (self.folder / "daemon.out").read_text()

    def command(self, *arguments: str) -> list[str]:
        place = ("--config", str(self.file), "--state-dir", str(self.state.root))
        return [*self.program, *place, *arguments]

    def tqd(self, *arguments: str) -> Result:
        """Run a `tqd` command to its end, in this process: the daemon and its workers have their own."""
        place = ("--config", str(self.file), "--state-dir", str(self.state.root))
        return CliRunner(env=self.environment).invoke(main, [*place, *arguments])

    def shell(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `tqd` command to its end, as a process of its own."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=2 * LONGEST_WAIT_S,
            check=False,
        )

    def signal(self, number: signal.Signals) -> None:
        assert self.daemon is not None
        self.daemon.send_signal(number)

    def ended(self) -> int:
        """Wait for the daemon to end; return its exit code."""
        assert self.daemon is not None
        return self.daemon.wait(LONGEST_WAIT_S)

    def config(self) -> dict[str, Any]:
        return dict(self.client.status()["config"])

    def server(self, name: str) -> ServerStatus:
        return next(it for it in self.client.status()["servers"] if it["name"] == name)

    def is_in(self, name: str, state: str) -> ServerStatus:
        """Wait until server *name* is in *state*."""
        return until(
            lambda: (it := self.server(name))["state"] == state and it, f"{name} is {state}"
        )

    def ready(self, *names: str) -> dict[str, int]:
        """Wait until *names*, or all servers, are ready; return their pids."""
        pids = {}
        for name in names or self.servers:
            pids[name] = self.is_in(name, "ready")["pid"]
        return pids

    def loaded(self, name: str, launch: int = 1) -> ServerStatus:
        """Wait until server *name* is ready, with a real worker, for the time of its so-manieth *launch*."""
        return until(
            lambda: (it := self.server(name))["state"] == "ready" and it["launch"] == launch and it,
            f"launch {launch} of {name} is ready",
            LONGEST_LOAD_S,
        )

    def applied(self, generation: int) -> None:
        until(lambda: self.config()["generation"] >= generation, f"edit {generation} is applied")

    def processes(self) -> dict[psutil.Process, dict[str, str]]:
        """Return what lives of this site, whoever its parent is, and the environment it was started in."""
        found = {}
        # not `process_iter`: that remembers processes whose pids are others' by now
        for pid in psutil.pids():
            try:
                process = psutil.Process(pid)
                environ = process.environ()
            except psutil.Error:  # gone, or a zombie
                continue
            if environ.get("SITE") == str(self.folder):
                found[process] = environ
        return found

    def workers(self) -> dict[int, str]:
        """Return every stub worker of this site, whoever its parent is: pid → server.

        All of them lived at one moment: one that ended while the others were looked for is left out.
        """
        found = {
            process: environ["STUB_NAME"]
            for process, environ in self.processes().items()
            if "STUB_NAME" in environ
        }
        return {process.pid: name for process, name in found.items() if lives(process)}

    def clean(self) -> None:
        """End whatever still runs, and see it gone: what is left over slows the next test down."""
        until(lambda: not self._killed(), "all that was started has ended")
        if self.daemon is not None:
            self.daemon.wait(LONGEST_WAIT_S)

    def _killed(self) -> list[psutil.Process]:
        """Kill what lives of this site, the daemon before its workers; return it."""
        found = sorted(self.processes(), key=lambda process: process.create_time())
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return found


def lives(process: psutil.Process) -> bool:
    """Whether *process* has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture(scope="session", autouse=True)
def _interrupts_reach_what_is_started() -> None:
    """A suite that runs in the background of a shell ignores SIGINT, and so would every program that it starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.environment["SITE"] = str(tmp_path)
    yield site
    site.clean()


def _write_model(folder: Path) -> None:
    """Write the smallest folder that passes for a model: a config and one tensor of zeros."""
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    tensors = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(tensors)
