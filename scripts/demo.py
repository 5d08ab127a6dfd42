"""`make demo`: tqd's main job in about a minute, on the demo model, in a temporary folder.

Starts a daemon on two servers (the same model with an exact and with a quantized KV cache), asks both
the same question through the OpenAI API, shows what each cache costs, edits servers.yaml, shows that
only the edited server restarted, and stops everything it started.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

TQD = Path(sys.executable).with_name("tqd")
QUESTION = "What is the capital of France? Answer in one sentence."
RELOAD_LIMIT_S = 180

SERVERS = """\
version: 1
daemon:
  status: 127.0.0.1:{status}
servers:
  exact:                   # the reference: keys and values as the model computes them
    model: {model}
    port: {exact}
    kv: {{policy: exact}}
  chat:                    # 8-bit keys, 4-bit values, 4 sink tokens and the newest 32 in full precision
    model: {model}
    port: {chat}
    kv: {{mode: turbo8v4}}
"""


def main() -> int:
    """Run the demo; return 0 when everything happened as announced."""
    step("The demo model: SmolLM2-135M-Instruct")
    model = tqd("demo-model", capture=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="tqd-demo-") as scratch:
        folder = Path(scratch)
        config = folder / "servers.yaml"
        ports = dict(zip(("status", "exact", "chat"), free_ports(3), strict=True))
        config.write_text(SERVERS.format(model=model, **ports))
        os.environ.update(TQD_CONFIG=str(config), TQD_STATE_DIR=str(folder / "state"))
        print(config.read_text())
        try:
            return show(config, ports)
        finally:
            step("Stopping: tqd shutdown")
            tqd("shutdown")


def show(config: Path, ports: dict[str, int]) -> int:
    """Start, ask, compare, edit, compare again."""
    step("Starting: tqd start --all")
    tqd("start", "--all")

    step(f"Asking both through the OpenAI API: {QUESTION}")
    for name in ("exact", "chat"):
        print(f"{name:>6}: ", end="", flush=True)
        for text in stream(ports[name], name, QUESTION):
            print(text, end="", flush=True)
        print()

    step("What runs: tqd status")
    tqd("status")
    print()
    for server in status():
        kv = server["kv"]
        ratio = kv["bytes_per_token_fp16"] / kv["bytes_per_token"]
        words = f"{ratio:.2f} times smaller" if ratio >= 1 else f"{1 / ratio:.2f} times larger"
        print(
            f"{server['name']:>6}: {kv['bytes_per_token']:>8,.0f} bytes of KV cache per token, measured: "
            f"{words} than a 16-bit cache ({kv['bytes_per_token_fp16']:,.0f})"
        )
    if status()[0]["model"]["device"] == "cpu":
        print("        (on a CPU the model computes in 32 bits, and exact means: kept as computed)")

    before = {server["name"]: server["pid"] for server in status()}
    step("Editing servers.yaml: chat from turbo8v4 to turbo8v3")
    edited = config.with_suffix(".new")
    edited.write_text(config.read_text().replace("turbo8v4", "turbo8v3"))
    edited.replace(config)  # as editors save: a new file under the old name
    wait_for_mode("chat", "turbo8v3")
    after = {server["name"]: server["pid"] for server in status()}
    tqd("status")
    print()
    for name in before:
        verdict = "restarted" if before[name] != after[name] else "kept running"
        print(f"{name:>6}: process {before[name]} → {after[name]}, {verdict}")
    return 0 if before["exact"] == after["exact"] and before["chat"] != after["chat"] else 1


def wait_for_mode(name: str, mode: str) -> None:
    """Wait until server *name* is ready with *mode* on every layer."""
    deadline = time.monotonic() + RELOAD_LIMIT_S
    while time.monotonic() < deadline:
        server = next(server for server in status() if server["name"] == name)
        if server["state"] == "ready" and list(server["kv"]["effective_modes"] or ()) == [mode]:
            print(" " * 40, end="\r")
            return
        print(f"{name} {server['state']} …", end="\r", flush=True)
        time.sleep(0.3)
    raise SystemExit(
        f"{name} was not ready with {mode} within {RELOAD_LIMIT_S} s; see tqd logs {name}"
    )


def status() -> list[dict[str, Any]]:
    """Return the servers of `tqd status --json`."""
    servers: list[dict[str, Any]] = json.loads(tqd("status", "--json", capture=True).stdout)[
        "servers"
    ]
    return servers


def stream(port: int, model: str, question: str) -> Any:
    """Yield the pieces of a streamed chat completion."""
    body = {
        "model": model,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": question}],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""


def tqd(*arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a tqd command as a user would."""
    return subprocess.run(
        [str(TQD), *arguments], check=True, text=True, stdout=subprocess.PIPE if capture else None
    )


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def step(text: str) -> None:
    """Announce what comes next."""
    print(f"\n\033[1m▸ {text}\033[0m" if sys.stdout.isatty() else f"\n▸ {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
