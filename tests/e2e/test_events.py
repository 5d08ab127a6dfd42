"""What a daemon tells about itself, asked as a user asks."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.e2e.conftest import Site


def get(site: Site, path: str) -> Any:
    url = f"http://127.0.0.1:{site.status_port}{path}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def test_what_happens_is_told_and_reloads_outlive_the_daemon(site: Site) -> None:
    site.status_port = site.free_port()
    site.add("chat", env={"TOKEN": "hunter2"})
    site.write()
    site.run()
    site.ready()
    seq = get(site, "/v1/status")["seq"]
    good = site.file.read_text()
    site.write(good.replace("port:", "prot:"))
    site.tqd("reload")
    assert get(site, f"/v1/status?wait={seq}&timeout=20")["seq"] > seq

    events = [json.loads(line) for line in site.tqd("events", "--json").stdout.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    moves = [
        (it["data"]["from"], it["data"]["to"]) for it in events if it["event"] == "server.changed"
    ]
    assert moves == [("absent", "starting"), ("starting", "loading"), ("loading", "ready")]
    assert [it["to"] for it in get(site, "/v1/servers/chat/history")["history"]] == [
        "starting",
        "loading",
        "ready",
    ]
    refused = next(it["data"] for it in events if it["data"].get("result") == "rejected")
    assert any("prot" in problem["message"] for problem in refused["errors"])
    assert "rejected; what runs is unchanged" in site.tqd("events").stdout

    config = get(site, "/v1/config")
    assert config["servers"]["chat"]["values"]["port"] == site.servers["chat"]["port"]
    assert "hunter2" not in json.dumps(config)

    site.write(good)
    site.tqd("shutdown")
    site.run()
    results = [it["result"] for it in get(site, "/v1/history")["reloads"]]
    assert results[0] == "applied"
    assert "rejected" in results
    assert results[-1] == "applied"
