"""A worker without a model: speaks the real channel and serves real HTTP, and misbehaves on demand.

Started in the place of `python -m daemon.worker` through $TQD_WORKER_COMMAND. What it does is written
in the server's `env:` block:

    STUB=crash-at-load | exit-CODE | hang-at-load | silent | deaf | stall | wrong-nonce
    STUB_LOAD_S=seconds   how long loading takes
    STUB_EXIT_AFTER_S=s   exits with 1 that long after it was ready
    STUB_DRAIN_S=seconds  how long the running requests take to finish
    STUB_DRAIN_UNTIL=path they finish when there is such a file
    STUB_BEAT_S=seconds   how often it says a snapshot
    STUB_PROMISED=bytes   the memory that its running requests may still come to use

It uses nothing but the standard library, so that a test may start many of them quickly.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

ORDERS = dict(os.environ)  # noqa: TID251 - a child has nothing else to go by
BEAT_S = float(ORDERS.get("STUB_BEAT_S", "0.1"))
MODE = ORDERS.get("STUB", "")


class Channel:
    """JSON lines over the socketpair; its end of file ends the worker."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._reader = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def read(self) -> dict:
        line = self._reader.readline()
        return json.loads(line) if line else {"type": "lease-lost"}

    def say(self, kind: str, **fields: object) -> None:
        line = json.dumps({"type": kind, **fields}).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            if MODE != "deaf":
                finish(0)


class State:
    ready = False
    draining = False
    spec: ClassVar[dict] = {}


def write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def finish(code: int) -> None:
    os._exit(code)


def drain() -> None:
    State.draining = True
    time.sleep(float(ORDERS.get("STUB_DRAIN_S", "0")))
    while "STUB_DRAIN_UNTIL" in ORDERS and not Path(ORDERS["STUB_DRAIN_UNTIL"]).exists():
        time.sleep(0.02)
    finish(0)


def listen_to_daemon(channel: Channel) -> None:
    while True:
        message = channel.read()
        match message["type"]:
            case "lease-lost":
                if MODE != "deaf":
                    finish(0)
                time.sleep(3600)
            case "drain" if MODE != "deaf":
                threading.Thread(target=drain).start()
            case "live":
                State.spec["server"] = message["server"]
                State.spec["memory_limit_bytes"] = message["memory_limit_bytes"]
                channel.say("ack", spec_hash=message["spec_hash"])
            case _:
                pass


class Answer(BaseHTTPRequestHandler):
    """Answers every GET with what a test may want to know."""

    def do_GET(self) -> None:
        if self.path == "/stream":
            self._stream()
            return
        body = json.dumps(
            {
                "name": State.spec["name"],
                "pid": os.getpid(),
                "launch": State.spec["launch"],
                "aliases": State.spec["server"]["aliases"],
                "memory_limit_bytes": State.spec["memory_limit_bytes"],
            }
        ).encode()
        self.send_response(200 if State.ready and not State.draining else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        """Say fifty lines within some seconds, then end."""
        self.send_response(200)
        self.end_headers()
        for number in range(50):
            self.wfile.write(f"{number}\n".encode())
            self.wfile.flush()
            time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        pass


def serve(fd: int) -> None:
    listener = socket.socket(fileno=fd)
    server = ThreadingHTTPServer(listener.getsockname(), Answer, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.serve_forever(poll_interval=0.05)


def load(channel: Channel) -> None:
    if MODE == "crash-at-load":
        write("about to fail\nRuntimeError: no such tensor")
        finish(1)
    if MODE.startswith("exit-"):
        code = int(MODE.removeprefix("exit-"))
        channel.say("fatal", code=code, message="said why", hint="do this")
        finish(code)
    if MODE == "hang-at-load":
        time.sleep(3600)
    load_s = float(ORDERS.get("STUB_LOAD_S", "0"))
    steps = max(int(load_s / 0.1), 1)
    for step in range(steps):
        channel.say("progress", stage="weights", fraction=step / steps)
        time.sleep(load_s / steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "deaf" else lambda *_: drain())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(arguments.channel_fd)
    State.spec = spec = channel.read()
    if MODE == "silent":
        time.sleep(3600)
    nonce = "wrong" if MODE == "wrong-nonce" else spec["nonce"]
    channel.say("hello", protocol=spec["protocol"], nonce=nonce, pid=os.getpid())
    threading.Thread(target=listen_to_daemon, args=(channel,), daemon=True).start()
    threading.Thread(target=serve, args=(arguments.listen_fd,), daemon=True).start()
    write(f"loading {spec['model_path']}")
    load(channel)
    State.ready = True
    channel.say("ready", nonce=nonce, spec_hash=spec["spec_hash"], load_s=0.1, **report(spec))
    write("ready")
    beat(channel)


def beat(channel: Channel) -> None:
    started = time.monotonic()
    exit_after_s = float(ORDERS.get("STUB_EXIT_AFTER_S", "inf"))
    generation = 0
    while True:
        generation += MODE != "stall"
        promised = max(int(ORDERS.get("STUB_PROMISED", "0")), State.spec["memory_limit_bytes"] or 0)
        channel.say("snapshot", generation=generation, memory_promised_bytes=promised, **NUMBERS)
        time.sleep(BEAT_S)
        if time.monotonic() - started > exit_after_s:
            write("had enough")
            finish(1)


NUMBERS = {
    "running": 0, "waiting": 0, "requests_total": 3, "errors_total": 0, "rejected_total": 0, "cancelled_total": 0,
    "prompt_tokens_total": 30, "generation_tokens_total": 12, "prompt_tps": 0.0, "decode_tps": 0.0,
    "kv_bytes": 1024, "kv_tokens": 8, "mlx_active_bytes": 2048, "mlx_cache_bytes": 0, "mlx_peak_bytes": 4096,
}  # fmt: skip


def report(spec: dict) -> dict:
    layer = {
        "first": 0,
        "last": 1,
        "kind": "full",
        "requested": "turbo8v4",
        "effective": "turbo8v4",
    }
    model = {
        "id": spec["server"]["model"], "path": spec["model_path"], "model_type": "llama", "layers": 2,
        "max_context": 128, "weights_bytes": 4096, "device": "stub", "mlx_version": "0", "mlx_lm_version": "0",
    }  # fmt: skip
    kv = {
        "policy": spec["kv"]["policy"], "summary": "turbo8v4 on 2 of 2 layers", "layers": [layer],
        "effective": {"turbo8v4": 2}, "sink_tokens": 4, "tail_tokens": 32, "backend": "reference",
        "bytes_per_token": 100.0, "bytes_per_token_fp16": 256.0,
    }  # fmt: skip
    return {"model": model, "kv": kv}


if __name__ == "__main__":
    main()
