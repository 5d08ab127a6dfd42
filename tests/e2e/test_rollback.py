"""A new section that does not become ready, with real processes: the old one serves again."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Site


def divergent(site: Site) -> dict[str, Any]:
    """Wait until a server has gone back to its previous section; return what is said about it."""
    found: list[dict[str, Any]] = site.until(lambda: site.config()["divergent"], "a rollback")
    [only] = found
    return only


@pytest.mark.parametrize("stub", ["exit-78", "crash-at-load", "hang-at-load"])
def test_a_section_that_fails_to_load_gives_way_to_the_one_that_served(
    site: Site, stub: str
) -> None:
    old_port = site.add("a")
    site.add("b")
    site.write()
    site.run()
    pids = site.ready()

    site.servers["a"] |= {
        "port": site.free_port(),
        "env": {"STUB": stub, "STUB_NAME": "a"},
        "probe": {"load_stall": "500ms"},  # what loads well may take its time
    }
    site.write()

    found = divergent(site)
    assert found["server"] == "a"
    assert site.ready()["b"] == pids["b"]
    assert site.get(old_port)[1]["launch"] == 3
    config = site.config()
    assert (config["state"], config["in_sync"]) == ("applied", False)
    assert found["spec_hash"] != site.server("a")["spec_hash"]

    shown = site.tqd("status").stdout.replace("\n", " ")
    assert "a went back to its previous section; the new one did not become ready" in shown
    assert "tqd restart a" in shown


def test_the_next_edit_of_the_section_is_tried_and_ends_the_divergence(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    site.ready()
    site.servers["a"]["env"]["STUB"] = "exit-78"
    site.write()
    divergent(site)
    site.ready()

    retry = site.tqd("restart", "a")
    assert (retry.exit_code, "went back to its previous section" in retry.stderr) == (1, True)
    site.ready()

    del site.servers["a"]["env"]["STUB"]
    site.servers["a"]["env"]["ROUND"] = "2"
    site.write()
    site.until(lambda: not site.config()["divergent"], "the divergence ends")
    site.ready()
    config = site.config()
    assert (config["state"], config["in_sync"]) == ("applied", True)


def test_an_edit_may_not_take_the_port_that_a_rolled_back_server_still_has(site: Site) -> None:
    old_port = site.add("a")
    site.write()
    site.run()
    site.ready()
    site.servers["a"] |= {"port": site.free_port(), "env": {"STUB": "exit-78"}}
    site.write()
    divergent(site)
    pids = site.ready()

    site.add("b")
    site.servers["b"]["port"] = old_port
    site.write()
    refusal = site.tqd("reload")
    assert (refusal.exit_code, "is used by a, whose new section failed" in refusal.stderr) == (
        2,
        True,
    )
    assert site.ready("a") == {"a": pids["a"]}


def test_launch_numbers_go_on_in_the_next_daemon(site: Site) -> None:
    site.add("a")
    site.write()
    site.run()
    site.ready()
    site.tqd("restart", "a")
    site.signal(signal.SIGKILL)
    site.ended()
    site.run()
    site.ready()
    assert site.server("a")["launch"] == 3
    log = site.state.server_log("a").read_text()
    marks = [line.split()[2] for line in log.splitlines() if line.startswith("--- launch")]
    assert marks == sorted(marks)
