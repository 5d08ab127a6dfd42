"""What the supervisor itself costs: reload latency, status latency while workers hang, memory, idle CPU.

    make bench-supervisor [ARGS="--servers 1,10 --json"]

Real daemons, real files and sockets; the workers are tests/stub_worker.py, which says a snapshot every five
seconds, as real workers do that have nothing to do. Nothing is asserted: the aims stand beside the figures.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from tests.e2e.conftest import Site, until

START_S = 300.0
LARGE_MACHINE = Path(__file__).parent / "large_machine.py"
QUESTIONS = 500


@dataclass(frozen=True)
class Row:
    """One figure and what is aimed at."""

    what: str
    servers: int
    value: float
    unit: str
    aim: str = ""


@contextmanager
def running(servers: int) -> Iterator[Site]:
    """A daemon with that many ready servers."""
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        site.environment["SITE"] = folder
        site.status_port = site.free_port()
        site.program = [sys.executable, str(LARGE_MACHINE)]
        for number in range(servers):
            site.add(f"s{number:03}", env={"STUB_BEAT_S": "5"})
        site.write()
        site.run()
        try:
            until(lambda: _ready(site) == servers, "every server is ready", START_S)
            yield site
        finally:
            site.signal(signal.SIGTERM)
            site.signal(signal.SIGTERM)
            until(site.daemon_ended, "the daemon has ended", START_S)
            site.clean()


def _ready(site: Site) -> int:
    return sum(it["state"] == "ready" for it in site.client.status()["servers"])


def reloads(site: Site, edits: int) -> list[float]:
    """Return seconds from the save of a file to its being in force, for edits of one server each."""
    found = []
    for number in range(edits):
        site.servers["s000"]["labels"] = {"round": str(number)}
        generation = site.config()["generation"]
        time.sleep(0.1 + 0.37 * (number % 3))  # at any time between two looks
        site.write()
        saved = time.time()
        site.applied(generation + 1)
        found.append(datetime.fromisoformat(site.config()["applied_at"]).timestamp() - saved)
    return found


def answers(site: Site) -> list[float]:
    """Return seconds that ``GET /v1/status`` took, again and again."""
    connection = http.client.HTTPConnection("127.0.0.1", site.status_port or 0)
    found = []
    for _ in range(QUESTIONS):
        start = time.perf_counter()
        connection.request("GET", "/v1/status")
        connection.getresponse().read()
        found.append(time.perf_counter() - start)
    connection.close()
    return found


def answers_while_workers_hang(site: Site) -> list[float]:
    """Stop half of the workers with SIGSTOP meanwhile: they neither answer nor read."""
    hung = list(site.workers())[::2]
    for pid in hung:
        os.kill(pid, signal.SIGSTOP)
    try:
        return answers(site)
    finally:
        for pid in hung:
            os.kill(pid, signal.SIGCONT)


def answers_while_scraped(site: Site) -> list[float]:
    """Ask while somebody reads ``/metrics``, once a second."""
    done = threading.Event()

    def scrape() -> None:
        while not done.wait(1.0):
            connection = http.client.HTTPConnection("127.0.0.1", site.status_port or 0)
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            connection.close()

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        return [it for _ in range(3) for it in answers(site)]
    finally:
        done.set()
        scraper.join()


def idle_cpu(site: Site, seconds: float) -> float:
    """Return the share of one core that the daemon takes while nothing happens, in percent."""
    assert site.daemon is not None
    process = psutil.Process(site.daemon.pid)
    before, start = cpu_s(process), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_s(process) - before) / (time.monotonic() - start)


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that *process* has taken."""
    times = process.cpu_times()
    return times.user + times.system


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


def measure(servers: int, *, edits: int, idle_s: float) -> Iterator[Row]:
    """Yield every figure of a daemon with that many servers."""
    with running(servers) as site:
        assert site.daemon is not None
        time.sleep(3.0)  # what starting has left to do
        memory = psutil.Process(site.daemon.pid).memory_info().rss / 1e6
        yield Row("idle CPU", servers, idle_cpu(site, idle_s), "% of a core", "< 0.5")
        yield Row("resident memory", servers, memory, "MB", "< 80")
        found = reloads(site, edits)
        yield Row("save → applied, median", servers, statistics.median(found), "s")
        yield Row("save → applied, worst", servers, max(found), "s", "< 1.5")
        process = psutil.Process(site.daemon.pid)
        before = cpu_s(process)
        yield Row("status, p99", servers, p99(answers(site)) * 1000, "ms")
        each_s = (cpu_s(process) - before) / QUESTIONS
        yield Row("status, CPU time of an answer", servers, each_s * 1000, "ms")
        hung = p99(answers_while_workers_hang(site)) * 1000
        yield Row("status while half of the workers hang, p99", servers, hung, "ms", "< 20")
        scraped = p99(answers_while_scraped(site)) * 1000
        yield Row("status while metrics are scraped, p99", servers, scraped, "ms", "< 20")


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", default="1,10,100", help="how many, separated by commas")
    parser.add_argument("--edits", type=int, default=10)
    parser.add_argument("--idle", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [
        row
        for servers in map(int, arguments.servers.split(","))
        for row in measure(servers, edits=arguments.edits, idle_s=arguments.idle)
    ]
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    if arguments.json:
        figures = [vars(row) for row in rows]
        print(json.dumps({"machine": machine, "python": sys.version, "figures": figures}))
        return
    print(
        f"{machine}, Python {platform.python_version()}; {arguments.edits} edits, {QUESTIONS} questions\n"
    )
    print(f"{'':45}{'servers':>8}{'':>12}{'aim':>18}")
    for row in rows:
        print(f"{row.what:45}{row.servers:>8}{row.value:>12.3f} {row.unit:12}{row.aim}")


if __name__ == "__main__":
    main()
