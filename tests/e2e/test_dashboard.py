"""The dashboard in a real browser, before a real daemon."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.chromium import Chromium, Page, program

if TYPE_CHECKING:
    from tests.e2e.conftest import Site

pytestmark = pytest.mark.skipif(
    program() is None, reason="needs Chromium (Debian: apt-get install chromium)"
)
HOSTILE_FILE = "<img src=x onerror=alert(3)>"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
STATES = "Object.fromEntries([...document.querySelectorAll('.server')].map(it => [it.querySelector('h3').textContent, it.querySelector('[data-at=state]').textContent]))"
LIVE = "document.getElementById('live')?.textContent"
FOCUSED = "(it => it.getAttribute('aria-label') || it.id || it.textContent)(document.activeElement)"
LAYERS = "layers 0–1 (full): turbo8v4; mlx attention"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    path = program()
    assert path is not None
    browser = Chromium(path, tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Chromium) -> Iterator[Page]:
    with Page(chromium) as page:
        yield page


def visit(page: Page, site: Site) -> None:
    """Start the daemon of *site* and open its dashboard."""
    site.status_port = site.free_port()
    site.write()
    site.run()
    page.call("Page.navigate", url=f"http://127.0.0.1:{site.status_port}/")
    page.until(LIVE, "the page is live", lambda said: said == "live")


def test_it_shows_what_runs_and_what_changes_without_a_reload_or_a_foreign_request(
    site: Site, page: Page
) -> None:
    site.add("chat")
    site.add("code", stub="crash-at-load")
    visit(page, site)
    wanted = {"chat": "ready", "code": "failed"}
    page.until(STATES, "both servers", lambda found: found == wanted)
    page.evaluate("window.same = true")

    reason = page.evaluate("document.querySelector('#server-code .why').textContent")
    assert reason.startswith("failed 3 times")
    assert "2 × turbo8v4" in page.evaluate("document.querySelector('#server-chat').textContent")
    assert page.evaluate("document.getElementById('attention').textContent") == "code failed"

    assert site.tqd("stop", "chat").exit_code == 0
    page.until(STATES, "chat is stopped", lambda found: found["chat"] == "stopped")
    site.add("late")
    site.write()
    page.until(STATES, "late is ready", lambda found: found.get("late") == "ready")
    site.servers.pop("code")
    site.write()
    page.until(STATES, "code is gone", lambda found: "code" not in found)
    page.until(
        "document.getElementById('events').textContent",
        "events",
        lambda it: "late starting → loading" in it and "code removed" in it,
    )
    page.until(
        "document.getElementById('reloads').textContent", "reloads", lambda it: "stop code" in it
    )

    assert page.evaluate("window.same")
    origin = f"http://127.0.0.1:{site.status_port}/"
    foreign = [url for url in page.requests if not url.startswith((origin, "data:", "about:"))]
    assert foreign == []
    assert page.complaints == []


# Holds the answers about the history back until window.go(), and keeps what the events say.
LATE_HISTORY = """{
const ask = window.fetch, listen = EventSource.prototype.addEventListener;
window.heard = "";
window.held = new Promise(done => { window.go = done; });
window.fetch = async (path, options) => {
  const answer = await ask(path, options);
  if (path === "/v1/history") { window.asked = true; await window.held; }
  return answer;
};
EventSource.prototype.addEventListener = function (name, take) {
  listen.call(this, name, event => { take(event); window.heard += name + (event.data || ""); });
};
}"""


def test_what_happens_while_the_history_is_read_is_told_once(site: Site, page: Page) -> None:
    site.add("chat")
    page.call("Page.addScriptToEvaluateOnNewDocument", source=LATE_HISTORY)
    visit(page, site)
    page.until("window.asked", "the history is asked for")
    page.until(STATES, "ready", lambda found: found == {"chat": "ready"})
    page.evaluate("window.go(); window.held = new Promise(done => { window.go = done; }); null")

    events = "[...document.querySelectorAll('#events li div')].map(it => it.textContent)"
    page.until(events, "the history", lambda found: "chat loading → ready" in found)
    page.evaluate("window.asked = false; source.dispatchEvent(new Event('open'))")
    page.until("window.asked", "the history is asked for again")
    assert site.tqd("stop", "chat").exit_code == 0
    page.until("window.heard", "the end is told", lambda said: '"to": "stopped"' in said)
    page.evaluate("window.go()")

    found = page.until(events, "the end", lambda found: "chat draining → stopped" in found)
    assert sorted(set(found)) == sorted(found)


def test_a_rejected_edit_is_shown_with_its_line_until_it_is_repaired(
    site: Site, page: Page
) -> None:
    site.add("chat")
    visit(page, site)
    problems = "[...document.querySelectorAll('#config-problems .place')].map(it => it.textContent)"
    assert page.evaluate(problems) == []
    good = site.file.read_text()
    site.write(good.replace("port:", "prot:"))
    site.tqd("reload")
    found = page.until(problems, "the problems", lambda it: len(it) == 2)
    line = good[: good.index("port:")].count("\n") + 1
    assert any(place.startswith(f"{site.file}:{line}:") for place in found)
    assert page.evaluate("document.getElementById('config-state').textContent") == "rejected"
    site.write(good)
    site.tqd("reload")
    page.until(problems, "no problems", lambda it: it == [])


def test_text_from_the_file_is_never_markup(site: Site, page: Page) -> None:
    site.add("chat", labels={"team": HOSTILE}, aliases=[HOSTILE])
    site.add("gone", model=f"./{HOSTILE_FILE}")
    visit(page, site)
    page.until(STATES, "ready", lambda found: found.get("chat") == "ready")
    site.write(site.text() + f"? '{HOSTILE}'\n: 1\n")
    site.tqd("reload")
    page.until("document.querySelectorAll('#config-problems .problem').length", "the problem")
    page.evaluate("document.querySelectorAll('summary').forEach(it => it.click())")

    assert f"team: {HOSTILE}" in page.evaluate("document.querySelector('#server-chat').textContent")
    assert HOSTILE_FILE in page.evaluate("document.querySelector('#server-gone').textContent")
    assert HOSTILE in page.evaluate("document.getElementById('config-problems').textContent")
    assert page.evaluate("document.querySelectorAll('img, script').length") == 1  # its own script
    with pytest.raises(AssertionError, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = 'x'")
    assert [it for it in page.complaints if "TrustedHTML" not in it] == []


def test_the_keyboard_reaches_everything_shows_where_it_is_and_reads_the_layers(
    site: Site, page: Page
) -> None:
    site.add("chat")
    visit(page, site)
    page.until(STATES, "ready", lambda found: found == {"chat": "ready"})
    reached = []
    for _ in range(6):
        page.press("Tab")
        reached.append(page.evaluate(FOCUSED))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        if reached[-1] == LAYERS:
            said = page.evaluate("document.querySelector('[data-at=schemes]').textContent")
            assert said == LAYERS
    assert reached == [
        "Skip to servers", "Find servers by name, state, model or label", LAYERS, "Details", "reloads", "events",
    ]  # fmt: skip
    assert page.evaluate("document.querySelector('[data-at=schemes]').textContent") != LAYERS
    page.press("/")
    nothing = "document.getElementById('nothing').checkVisibility()"
    page.call("Input.insertText", text="cha")
    assert not page.evaluate(nothing)
    page.call("Input.insertText", text="zzz")
    page.until(nothing, "that nothing matches")


def test_a_daemon_that_goes_away_is_noticed_and_its_return_too(site: Site, page: Page) -> None:
    site.add("chat")
    visit(page, site)
    site.signal(signal.SIGTERM)
    site.ended()
    page.until(LIVE, "it is gone", lambda said: said != "live")
    page.until("document.body.hasAttribute('data-stale')", "what is shown is old")
    assert page.evaluate(LIVE).startswith("stale for")
    site.run()
    page.until(LIVE, "it is back", lambda said: said == "live")
    page.until(STATES, "ready", lambda found: found == {"chat": "ready"})
    assert not page.evaluate("document.body.hasAttribute('data-stale')")


def test_a_narrow_screen_scrolls_down_only(site: Site, chromium: Chromium) -> None:
    site.add("a-name-about-as-long-as-names-may-be-which-is-63-characters", labels={"a": "b" * 200})
    with Page(chromium, width=360, height=700) as page:
        visit(page, site)
        page.until(STATES, "ready", lambda found: set(found.values()) == {"ready"})
        assert page.evaluate("document.documentElement.scrollWidth") == 360
