from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest

from daemon.config.wire import Histogram, RequestCounts
from daemon.metrics.catalogue import FAMILIES
from daemon.metrics.exposition import Page
from daemon.ops.metrics import metrics
from daemon.ops.view import View
from daemon.supervisor.conclusions import Reloads
from daemon.supervisor.plan import Fleet
from daemon.supervisor.server import State
from daemon.supervisor.workers import Report
from tests.metrics.lint import lint, value
from tests.ops.conftest import NOW, READY, SNAPSHOT

PROMTOOL = shutil.which("promtool")
SOME = Histogram(bounds=(1.0,), counts=(2, 1), sum=4.0)
COUNTS = RequestCounts(
    answered={"/v1/chat/completions": {"200": 3, "429": 1}},
    duration_s=SOME,
    ttft_s=SOME,
    tpot_s=SOME,
    queue_time_s=SOME,
)
# nothing feeds these yet: they appear with the machine's memory plan, which the status document will hold
NOT_YET = {
    "tqd_memory_budget_bytes", "tqd_memory_planned_bytes", "tqd_memory_available_bytes",
    "tqd_admission_rejections_total", "tqd_server_process_footprint_bytes",
}  # fmt: skip


@pytest.fixture
def busy(view: View) -> View:
    report = Report(7, READY)
    more = {"passed_at": 5.0, "kv_packing_s": 2.5, "kv_limit_bytes": 4096, "requests": COUNTS}
    report.sample(SNAPSHOT.model_copy(update=more), NOW - 1)
    return replace(view, reports={"chat": report})


def filled(view: View) -> Page:
    page = Page()
    for _ in metrics(view, page):
        pass
    return page


def text(view: View) -> str:
    return filled(view).render("").body.decode()


def test_the_page_is_clean_and_holds_every_family_of_the_catalogue(busy: View) -> None:
    written = {it.name for it in filled(busy).collect()}
    expected = {it.removesuffix("_total") for it in FAMILIES.keys() - NOT_YET}

    assert lint(text(busy)) == []
    assert expected <= written | {"tqd_config_last_reload_success_timestamp_seconds"}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_complain_about(busy: View) -> None:
    said = subprocess.run(
        [str(PROMTOOL), "check", "metrics"],
        input=text(busy),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_a_dead_server_still_has_its_own_series(view: View) -> None:
    page = text(view)

    def of(name: str, **labels: str) -> float | None:
        return value(page, name, server="code", **labels)

    assert (of("tqd_server_up"), of("tqd_server_ready")) == (0, 0)
    assert of("tqd_server_desired_running") == 1
    assert (of("tqd_server_state", state="failed"), of("tqd_server_state", state="ready")) == (1, 0)
    assert of("tqd_server_last_exit_code") == -9
    assert of("tqd_server_log_bytes_dropped_total") == 512
    assert of("tqd_worker_scrape_up") == 0


def test_a_server_is_in_exactly_one_state(view: View) -> None:
    page = text(view)
    for name in view.fleet.servers:
        states = [value(page, "tqd_server_state", server=name, state=state) for state in State]
        assert sorted(filter(None, states)) == [1]


def test_series_of_a_worker_carry_its_servers_name(busy: View) -> None:
    page = text(busy)

    assert value(page, "tqd_requests_running", server="chat") == 1
    labels = {"endpoint": "/v1/chat/completions", "code": "429"}
    assert value(page, "tqd_requests_total", server="chat", **labels) == 1
    assert value(page, "tqd_time_to_first_token_seconds_count", server="chat") == 3
    assert value(page, "tqd_mlx_memory_bytes", server="chat", kind="peak") == 4096
    assert value(page, "tqd_kv_layers", server="chat", mode="turbo8v4") == 3
    assert value(page, "tqd_kv_cache_usage_ratio", server="chat") == 0.25
    assert value(page, "tqd_kv_quantize_seconds_total", server="chat") == 2.5
    assert value(page, "tqd_kv_fallback_layers", server="chat", reason="a rule") == 1
    assert value(page, "tqd_attention_layers", server="chat", backend="reference") == 3
    assert value(page, "tqd_packing_layers", server="chat", backend="metal") == 3
    assert value(page, "tqd_packing_layers", server="chat", backend="mlx") == 1
    reason = "the metal kernels fail"
    assert value(page, "tqd_kernel_fallback_layers", server="chat", reason=reason) == 3


def test_counters_of_a_dead_worker_stay_and_gauges_go(busy: View) -> None:
    """A gauge of a process that is gone would be a lie; a counter that vanished would lose its increase."""
    chat = replace(busy.fleet.servers["chat"], worker=None, state=State.BACKOFF, attempt_at=NOW + 8)
    page = text(replace(busy, fleet=Fleet("b", {"chat": chat})))

    assert value(page, "tqd_prompt_tokens_total", server="chat") == 90
    assert value(page, "tqd_queue_time_seconds_sum", server="chat") == 4
    assert value(page, "tqd_requests_running", server="chat") is None
    assert value(page, "tqd_kv_layers", server="chat", mode="turbo8v4") is None
    assert value(page, "tqd_server_backoff_seconds", server="chat") == 8


def test_counters_stay_until_the_next_worker_tells_its_own(busy: View) -> None:
    chat = busy.fleet.servers["chat"]
    assert chat.worker is not None
    loading = replace(chat, worker=replace(chat.worker, launch=8), state=State.LOADING)
    old = busy.reports["chat"]
    new = Report(8, counted=old.counted, requests=old.requests)
    after = replace(busy, fleet=Fleet("b", {"chat": loading}), reports={"chat": new})
    assert value(text(after), "tqd_generation_tokens_total", server="chat") == 45
    assert value(text(after), "tqd_requests_running", server="chat") is None

    new.sample(SNAPSHOT.model_copy(update={"generation_tokens_total": 1}), NOW)
    assert value(text(after), "tqd_generation_tokens_total", server="chat") == 1


def test_a_snapshot_without_counts_means_that_they_are_as_before(busy: View) -> None:
    busy.reports["chat"].sample(SNAPSHOT, NOW)

    assert value(text(busy), "tqd_request_duration_seconds_count", server="chat") == 3


@pytest.mark.parametrize(("age_s", "fresh"), [(0.5, 1), (4.9, 1), (5.1, 0), (3600, 0)])
def test_a_worker_that_pushes_nothing_any_more_is_told_from_one_that_does(
    busy: View, age_s: float, fresh: int
) -> None:
    busy.reports["chat"].sampled_at = NOW - age_s

    assert value(text(busy), "tqd_worker_scrape_up", server="chat") == fresh


@pytest.mark.parametrize(
    ("state", "successful"), [("applied", 1), ("pending", 1), ("rejected", 0), ("stale", 0)]
)
def test_a_rejected_file_is_a_metric(view: View, state: str, successful: int) -> None:
    config = replace(view.config, state=state, reloads=Reloads(2, 1, 4, succeeded_at=77.0))  # type: ignore[arg-type]
    page = text(replace(view, config=config))

    assert value(page, "tqd_config_last_reload_successful") == successful
    assert value(page, "tqd_config_last_reload_success_timestamp_seconds") == 77
    counts = [
        value(page, "tqd_config_reloads_total", result=it) for it in ("applied", "rejected", "noop")
    ]
    assert counts == [2, 1, 4]


def test_secrets_are_not_on_the_page(view: View) -> None:
    chat = view.fleet.servers["chat"]
    spec = chat.spec.model_copy(update={"api_key": "hunter2", "env": {"TOKEN": "hunter2"}})
    keyed = replace(view, fleet=Fleet("b", {"chat": replace(chat, spec=spec)}))

    assert "hunter2" not in text(keyed)


def test_others_get_their_turn_after_each_server(busy: View) -> None:
    assert len(list(metrics(busy, Page()))) == len(busy.fleet.servers)
