"""Minutes of bad luck for a real daemon: edits, half-written files, kills of workers and of the daemon.

    make soak [MINUTES=10] [ARGS="--seed 7 --no-model"]

Stub workers, one real worker on the demo model with a client that streams all the time, and after every
step a look through /proc and the status document: never two workers of one name, no server lost, no worker
without a daemon, nothing ended by a file that was refused. It prints figures, and fails at the first breach.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from daemon import paths
from daemon.errors import DaemonUnreachableError, TqdError
from daemon.measure import demo_model
from tests.e2e.conftest import ROOT, Site, until

STUBS = ("a", "b", "c", "d")
REAL = "real"
SETTLED_S = 240.0
LEASE_S = 20.0  # a worker without a daemon may take this long to go


class BreachError(AssertionError):
    """A promise was broken."""


class Soak:
    """One site under random stress."""

    def __init__(self, folder: Path, seed: int, model: Path | None) -> None:
        self.rng = random.Random(seed)
        self.site = Site(folder)
        self.site.environment |= {
            "SITE": str(folder),
            "TQD_WORKER_COMMAND": f"{sys.executable} {ROOT / 'tests/soak/worker.py'}",
        }
        self.done = threading.Event()
        self.did: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        self.status_s: list[float] = []
        self.orphaned: dict[int, float] = {}
        self.good = ""
        self._round = 0
        for name in STUBS:
            self.site.add(name, env={"SOAK_NAME": name})
        self.real_port = None
        if model is not None:
            self.real_port = self.site.add(REAL, env={"SOAK_NAME": REAL})
            del self.site.servers[REAL]["env"]["STUB_NAME"]
            self.site.servers[REAL] |= {
                "model": str(model),
                "max_context": 512,
                "stop_grace": "20s",
            }
            self.site.servers[REAL]["kv"] = {"mode": "turbo8v4", "calibration": "none"}

    # what happens

    def edit(self) -> None:
        self._round += 1
        names = [it for it in self.site.servers if it != REAL]
        match self.rng.choice("vvvvllrab" if names else "a"):
            case "v":
                self.site.servers[self.rng.choice(names)]["env"]["ROUND"] = str(self._round)
            case "l":
                name = self.rng.choice(list(self.site.servers))
                self.site.servers[name]["labels"] = {"round": str(self._round)}
            case "r" if len(names) > 1:
                del self.site.servers[self.rng.choice(names)]
            case "b":
                name = self.rng.choice(names)
                self.site.servers[name]["env"] |= {"STUB": "exit-78", "ROUND": str(self._round)}
            case _:
                missing = [it for it in STUBS if it not in self.site.servers]
                for name in missing[:1]:
                    self.site.add(name, env={"SOAK_NAME": name})
        self._save()

    def repair(self) -> None:
        for server in self.site.servers.values():
            server["env"].pop("STUB", None)
        self._save()

    def save_in_parts(self) -> None:
        text = self.site.text()
        lines = text.splitlines(keepends=True)
        self.site.file.write_text("".join(lines[: self.rng.randrange(len(lines))]))
        time.sleep(self.rng.uniform(0.0, 0.2))
        self.site.file.write_text(text)
        self.good = text

    def save_broken(self) -> None:
        """A refused file ends nothing."""
        until(lambda: self._in_sync(), "the last edit is in force", SETTLED_S)
        before = self._ready_pids()
        self.site.write(self.good + "\nbroken: [\n")
        until(lambda: self._config()["state"] == "rejected", "the file is rejected", SETTLED_S)
        after = self._alive_pids()
        if ended := {name for name, pid in before.items() if after.get(name) != pid}:
            raise BreachError(f"a refused file ended {sorted(ended)}")
        self._save()

    def kill_a_worker(self) -> None:
        if pids := list(self._alive_pids().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rng.choice(pids), signal.SIGKILL)

    def kill_the_daemon(self) -> None:
        self.site.signal(signal.SIGKILL)
        self.site.ended()
        if self.rng.random() < 0.5:
            time.sleep(self.rng.uniform(0, 3))
        self._run()

    def restart_the_daemon(self) -> None:
        self.site.signal(signal.SIGTERM)
        until(self.site.daemon_ended, "the daemon has ended", SETTLED_S)
        if left := self.workers():
            raise BreachError(f"workers {left} outlived an orderly end of the daemon")
        self._run()

    def command(self) -> None:
        path = self.rng.choice(["/restart", "/stop", "/start"])
        names = self.rng.sample(list(self.site.servers), 1)
        with contextlib.suppress(TqdError):  # such as one that the daemon does not know yet
            self.site.client.act(path[1:], names)  # type: ignore[arg-type]

    def hang_up(self) -> None:
        self.site.signal(signal.SIGHUP)

    # looks

    def workers(self) -> dict[int, str]:
        """Return every worker of this site, whoever its parent is: pid → server."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.status() == psutil.STATUS_ZOMBIE
                    or "--channel-fd" not in process.cmdline()
                ):
                    continue
                environ = process.environ()
                if environ.get("SITE") == str(self.site.folder):
                    found[process.pid] = environ["SOAK_NAME"]
        return found

    def check(self) -> None:
        """Look at processes and status; raise BreachError when a promise is broken."""
        workers = self.workers()
        twice = [name for name, count in Counter(workers.values()).items() if count > 1]
        if twice:
            raise BreachError(f"two workers of {twice}: {workers}")
        started = time.perf_counter()
        try:
            status = self.site.client.status()
        except DaemonUnreachableError as error:
            raise BreachError(f"the daemon is gone: {self.site.daemon_output()[-2000:]}") from error
        self.status_s.append(time.perf_counter() - started)
        known = {it["pid"] for it in status["servers"]}
        now = time.monotonic()
        self.orphaned = {pid: self.orphaned.get(pid, now) for pid in workers if pid not in known}
        if old := [pid for pid, since in self.orphaned.items() if now - since > LEASE_S]:
            raise BreachError(f"{old} have been running for {LEASE_S} s without a daemon")

    def calm_down(self) -> None:
        """In the end everything is as the file says."""
        self.repair()
        until(lambda: self._in_sync(), "the last edit is in force", SETTLED_S)
        until(lambda: not self._config()["divergent"] or self._retry(), "no divergence", SETTLED_S)
        self.site.client.act("start", None)
        names = set(self.site.servers)
        until(lambda: set(self._ready_pids()) == names, "every server is ready", SETTLED_S)
        until(lambda: set(self.workers().values()) == names, "no other worker runs", SETTLED_S)
        self.check()

    def _retry(self) -> bool:
        for divergent in self._config()["divergent"]:
            self.site.client.act("restart", [divergent["server"]])
        time.sleep(1)
        return False

    def stream(self) -> None:
        """Ask the real worker for streams, one after another, and count how they end."""
        body = {
            "model": REAL,
            "stream": True,
            "max_tokens": 24,
            "messages": [{"role": "user", "content": "Count."}],
        }
        url = f"http://127.0.0.1:{self.real_port}/v1/chat/completions"
        headers = {"Content-Type": "application/json"}
        while not self.done.is_set():
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    lines = answer.read().decode()
                ended = (
                    "whole"
                    if lines.rstrip().endswith("[DONE]")
                    else "error event"
                    if '"error"' in lines
                    else "cut"
                )
            except urllib.error.HTTPError as error:
                ended = f"HTTP {error.code}"
            except urllib.error.URLError:  # nothing listens: it is stopped, or the daemon is gone
                ended = "no connection"
            except (OSError, http.client.HTTPException):  # its worker was killed
                ended = "cut"
            self.streams[ended] += 1
            self.done.wait(0.5)

    # helpers of its own

    def _run(self) -> None:
        self.site.run()

    def _save(self) -> None:
        self.good = self.site.text()
        self.site.write(self.good)

    def _in_sync(self) -> bool:
        running = {it["name"] for it in self.site.client.status()["servers"]}
        config = self._config()
        wanted = set(yaml.safe_load(self.good)["servers"])
        return (
            config["state"] == "applied"
            and config["hash_on_disk"] == config["hash_applied"]
            and wanted <= running
        )

    def _config(self) -> dict[str, Any]:
        return self.site.config()

    def _ready_pids(self) -> dict[str, int]:
        servers = self.site.client.status()["servers"]
        return {it["name"]: it["pid"] for it in servers if it["state"] == "ready" and it["pid"]}

    def _alive_pids(self) -> dict[str, int]:
        return {it["name"]: it["pid"] for it in self.site.client.status()["servers"] if it["pid"]}


def live(soak: Soak, until_s: float) -> None:
    """Do one thing after another until the time is up."""
    actions: list[tuple[Callable[[], None], int]] = [
        (soak.edit, 10), (soak.repair, 3), (soak.save_in_parts, 4), (soak.save_broken, 2), (soak.kill_a_worker, 4),
        (soak.kill_the_daemon, 2), (soak.restart_the_daemon, 1), (soak.command, 4), (soak.hang_up, 2),
    ]  # fmt: skip
    while time.monotonic() < until_s:
        [act] = soak.rng.choices([it for it, _ in actions], [weight for _, weight in actions])
        soak.did[act.__name__] += 1
        act()
        pause = time.monotonic() + soak.rng.choice([0.1, 0.5, 2.0, 5.0])
        while time.monotonic() < pause:
            soak.check()
            time.sleep(0.25)


def report(soak: Soak, minutes: float) -> None:
    """Print the figures."""
    assert soak.site.daemon is not None
    daemon = psutil.Process(soak.site.daemon.pid)
    log = soak.site.daemon_output()
    print(
        f"{minutes:.1f} minutes, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    print(f"did: {dict(soak.did)}")
    print(f"launches: {log.count('worker.started')}, rollbacks: {log.count('server.rolled_back')}")
    print(f"streams of the real worker: {dict(soak.streams) or 'none'}")
    worst = max(soak.status_s) * 1000
    print(
        f"status: {len(soak.status_s)} asked, median {statistics.median(soak.status_s) * 1000:.1f} ms, worst {worst:.1f} ms"
    )
    print(
        f"daemon: {daemon.memory_info().rss / 1e6:.1f} MB, {daemon.num_fds()} descriptors, {daemon.num_threads()} threads"
    )


def main() -> None:
    """Soak, calm down, report; exit with 1 at a breach."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--no-model", action="store_true", help="stub workers only")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    model = None if arguments.no_model else demo_model.make(paths.cache_dir())
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), arguments.seed, model)
        soak._save()
        try:
            soak._run()
            streaming = threading.Thread(target=soak.stream)
            if model is not None:
                streaming.start()
            live(soak, time.monotonic() + 60 * arguments.minutes)
            soak.calm_down()
            soak.done.set()
            report(soak, arguments.minutes)
            soak.restart_the_daemon()
            soak.site.signal(signal.SIGTERM)
            soak.site.ended()
            print("kept every promise")
        except AssertionError:
            print(f"did: {dict(soak.did)}; the daemon wrote:\n{soak.site.daemon_output()[-6000:]}")
            raise
        finally:
            soak.done.set()
            for pid in soak.workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            soak.site.clean()


if __name__ == "__main__":
    main()
