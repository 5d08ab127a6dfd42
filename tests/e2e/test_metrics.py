"""The metrics of a real daemon: they move, they stay when workers die, and no worker can hold them up."""

from __future__ import annotations

import os
import signal
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.metrics.lint import lint, value

if TYPE_CHECKING:
    from tests.e2e.conftest import Site


@pytest.fixture
def site(site: Site) -> Site:
    site.status_port = site.free_port()
    return site


def page(site: Site) -> str:
    url = f"http://127.0.0.1:{site.status_port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_what_happens_to_servers_and_edits_is_counted(site: Site) -> None:
    site.add("a")
    site.add("b")
    site.write()
    site.run()
    pid = site.ready()["a"]
    before = page(site)
    assert lint(before) == []
    assert value(before, "tqd_server_restarts_total", server="a", reason="oom") == 0
    assert value(before, "tqd_server_load_duration_seconds_count", server="a") == 1

    os.kill(pid, signal.SIGKILL)
    site.until(lambda: site.server("a")["launch"] == 2, "another worker")
    site.ready()
    site.write("servers: [")
    site.until(lambda: site.config()["state"] == "rejected", "the broken file is rejected")
    after = page(site)

    assert lint(after) == []
    assert value(after, "tqd_server_restarts_total", server="a", reason="oom") == 1
    assert value(after, "tqd_server_restarts_total", server="b", reason="oom") == 0
    assert value(after, "tqd_server_last_exit_code", server="a") == -9
    assert value(after, "tqd_server_load_duration_seconds_count", server="a") == 2
    assert value(after, "tqd_config_last_reload_successful") == 0
    assert value(after, "tqd_config_in_sync") == 0
    assert value(after, "tqd_config_reloads_total", result="rejected") == 1


def test_a_frozen_worker_holds_no_scrape_up_and_its_last_counts_stay(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    pid = site.ready()["a"]
    site.until(
        lambda: value(page(site), "tqd_prompt_tokens_total", server="a") == 30, "a first snapshot"
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        site.until(
            lambda: value(page(site), "tqd_worker_scrape_up", server="a") == 0,
            "its numbers are old",
        )
        assert value(page(site), "tqd_prompt_tokens_total", server="a") == 30
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(600)
def test_counters_of_a_real_worker_move_with_requests_and_outlive_it(site: Site) -> None:
    """vllm-mlx exported series that stood at zero for ever; here every one of them moves."""
    from tests.worker.tiny_model import write_tiny_model

    write_tiny_model(site.folder / "tiny")
    site.environment["TQD_WORKER_COMMAND"] = f"{sys.executable} -m daemon.worker"
    port = site.add("a", model="./tiny", kv={"mode": "turbo8v4"}, drain_timeout="5s")
    site.write()
    site.run()
    site.loaded("a")

    def count(name: str, **labels: str) -> float:
        return value(page(site), f"tqd_{name}", server="a", **labels) or 0.0

    site.until(lambda: count("mlx_memory_bytes", kind="active") > 0, "a first snapshot")
    heartbeat = count("generation_loop_heartbeat_timestamp_seconds")
    assert count("kv_layers", mode="turbo8v4") == 3
    for answers in (1, 2):
        ask(port)
        labels = {"endpoint": "/v1/completions", "code": "200"}
        site.until(lambda: count("requests_total", **labels) == answers, "the answer is counted")  # noqa: B023
        assert count("generation_tokens_total") == 100 * answers
        assert count("prompt_tokens_total") >= 3 * answers
        for name in ("request_duration", "time_to_first_token", "queue_time"):
            assert count(f"{name}_seconds_count") == answers
            assert count(f"{name}_seconds_sum") > 0
        assert count("time_per_output_token_seconds_count") == answers
    site.until(
        lambda: count("generation_loop_heartbeat_timestamp_seconds") > heartbeat, "a heartbeat"
    )
    assert count("kv_quantize_seconds_total") > 0
    assert site.server("a")["throughput"]["ttft_p50_s"] > 0  # type: ignore[index]

    assert site.tqd("stop", "a").exit_code == 0
    after = page(site)
    assert lint(after) == []
    assert value(after, "tqd_generation_tokens_total", server="a") == 200
    assert value(after, "tqd_requests_running", server="a") is None


def ask(port: int) -> None:
    body = b'{"prompt": "The capital of France", "max_tokens": 100, "ignore_eos": true}'
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
