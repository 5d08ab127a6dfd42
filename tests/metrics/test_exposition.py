from __future__ import annotations

import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import parser as openmetrics

from daemon.config.wire import Histogram
from daemon.metrics.exposition import Exposition, Page
from tests.metrics.lint import lint, value

PLAIN = ""


def text(page: Page, accept: str = PLAIN) -> str:
    return page.render(accept).body.decode()


def test_a_page_reads_back_as_it_was_written() -> None:
    page = Page()
    page.add("tqd_server_up", 1, server="chat")
    page.add("tqd_requests_total", 3, server="chat", endpoint="/v1/models", code="200")
    page.add_histogram(
        "tqd_queue_time_seconds", Histogram(bounds=(0.1, 1.0), counts=(2, 0, 1), sum=5.5), server="chat"
    )  # fmt: skip
    written = text(page)

    assert lint(written) == []
    assert value(written, "tqd_server_up", server="chat") == 1
    labels = {"server": "chat", "endpoint": "/v1/models", "code": "200"}
    assert value(written, "tqd_requests_total", **labels) == 3
    bucket = "tqd_queue_time_seconds_bucket"
    counts = [value(written, bucket, server="chat", le=le) for le in ("0.1", "1.0", "+Inf")]
    assert counts == [2, 2, 3]
    assert value(written, "tqd_queue_time_seconds_sum", server="chat") == 5.5
    assert value(written, "tqd_queue_time_seconds_count", server="chat") == 3


def test_label_values_are_escaped() -> None:
    page = Page()
    page.add("tqd_kv_fallback_layers", 1, reason='a "b"\\\nc')

    assert value(text(page), "tqd_kv_fallback_layers", reason='a "b"\\\nc') == 1


def test_openmetrics_is_written_for_those_who_ask_for_it() -> None:
    page = Page()
    page.add("tqd_prompt_tokens_total", 7)
    page.add("tqd_requests_running", 2)
    written = page.render("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")

    assert written.content_type.startswith("application/openmetrics-text")
    found = openmetrics.text_string_to_metric_families(written.body.decode())
    families = [(it.type, it.samples[0].value) for it in found]
    assert families == [("gauge", 2), ("counter", 7)]
    assert page.render("*/*").content_type.startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("accept", [PLAIN, "application/openmetrics-text;version=1.0.0"])
def test_a_page_in_parts_is_what_it_would_be_at_once(accept: str) -> None:
    page, waited = Page(), Histogram(bounds=(0.1, 1.0), counts=(2, 0, 1), sum=5.5)
    for number in range(70):
        page.add("tqd_requests_total", 3, server=f"s{number}", endpoint="/v1/models", code="200")
        page.add_histogram("tqd_queue_time_seconds", waited, server=f"s{number}")
    encode, content_type = choose_encoder(accept)

    assert page.render(accept) == Exposition(encode(page), content_type)
    assert len(list(page.parts(accept))) == 1 + 4


@pytest.mark.parametrize(
    ("name", "labels"), [("tqd_made_up", {}), ("tqd_server_state", {"server": "a"}), ("tqd_server_up", {"pid": "1"})]
)  # fmt: skip
def test_nothing_but_the_catalogue_can_be_written(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=name):
        Page().add(name, 1, **labels)


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("# TYPE tqd_a gauge\ntqd_a 1\n", "tqd_a has 0 lines of HELP"),
        ("# HELP tqd_a_ms x\n# TYPE tqd_a_ms gauge\ntqd_a_ms 1\n", "tqd_a_ms is not in a base unit"),
        ("# HELP tqd_a x\n# TYPE tqd_a gauge\ntqd_a 1\ntqd_a 2\n", "tqd_a{} is there 2 times"),
        ("# HELP tqd_a_percent x\n# TYPE tqd_a_percent gauge\ntqd_a_percent 1\n", "tqd_a_percent is not in a base unit"),
        ("# HELP a x\n# TYPE a gauge\na 1\n", "a is not lower_snake_case after tqd_"),
    ],
)  # fmt: skip
def test_the_lint_of_these_tests_finds_what_is_wrong(page: str, problem: str) -> None:
    assert lint(page) == [problem]
