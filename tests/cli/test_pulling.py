"""`tqd pull` against a small hub on this machine; it was never run against the real one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from daemon.cli.main import main
from tests.conftest import safetensors

COMMIT = "c" * 40
TAGGED = "d" * 40
WEIGHTS = 24 * 10**6  # bytes; the library writes in pieces of ten million
CUT = 12 * 10**6  # where connections break that do


class Hub(BaseHTTPRequestHandler):
    """The few routes of a hub that a download needs: a model's files, their metadata, their bytes."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    failing: ClassVar[bool] = False
    breaking: ClassVar[bool] = False

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "small"]:
            self._model(parts[4:], body)
        elif parts[:3] == ["org", "small", "resolve"]:
            self._file(parts[3], "/".join(parts[4:]), body)
        else:
            self._refuse(404, "RepoNotFound")

    def _model(self, rest: list[str], body: bool) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        commit = {"main": COMMIT, COMMIT: COMMIT, "v1": TAGGED, TAGGED: TAGGED}.get(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return
        document: Any = {
            "id": "org/small",
            "sha": commit,
            "siblings": [{"rfilename": name} for name in self.files],
        }
        if rest and rest[0] == "tree":
            document = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in self.files.items()
            ]
        self._send(200, json.dumps(document).encode(), body, {"Content-Type": "application/json"})

    def _file(self, commit: str, name: str, body: bool) -> None:
        data = self.files.get(name)
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        if body:
            self.asked.append(f"{name} {self.headers.get('Range', '')}".strip())
        if self.failing and body and name.endswith(".safetensors"):
            self._refuse(403, "Gone")
            return
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}
        begin = 0
        if wanted := self.headers.get("Range"):
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(206 if begin else 200, data[begin:], body, headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", True, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        if self.breaking and len(data) > CUT:
            self.wfile.write(data[:CUT])
            self.close_connection = True
            return
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[type[Hub]]:
    class Fresh(Hub):
        files: ClassVar[dict[str, bytes]] = {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b"{}",
            "model.safetensors": safetensors(WEIGHTS),
            "modeling_small.py": b"raise SystemExit('never run')",
            "pytorch_model.bin": b"never loaded",
        }
        asked: ClassVar[list[str]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Fresh) as server:
        Fresh.address = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Fresh
        server.shutdown()


def pull(tmp_path: Path, hub: Any, *arguments: str, **keys: str) -> Result:
    env = f"env: {{HF_ENDPOINT: '{hub.address}', HF_HUB_CACHE: {tmp_path / 'hf/hub'}}}"
    lines = "".join(f", {name}: {value}" for name, value in keys.items())
    (tmp_path / "servers.yaml").write_text(
        "version: 1\nservers:\n"
        f"  chat: {{model: org/small, port: 8081, {env}{lines}}}\n"
        f"  local: {{model: {tmp_path}, port: 8082}}\n"
        f"  other: {{model: org/missing, port: 8083, {env}, enabled: false}}\n"
    )
    return CliRunner().invoke(main, ["-c", str(tmp_path / "servers.yaml"), "pull", *arguments])


def snapshot(tmp_path: Path, commit: str = COMMIT) -> set[str]:
    folder = tmp_path / "hf/hub/models--org--small/snapshots" / commit
    return {path.name for path in folder.iterdir()}


def test_pull_fetches_what_mlx_loads_and_takes_up_a_connection_where_it_broke(
    tmp_path: Path, hub: Any
) -> None:
    hub.breaking = True
    done = pull(tmp_path, hub, "--all")
    assert done.exit_code == 0, done.stderr
    assert f"chat: org/small is here, commit {COMMIT}, weights 22.9 MiB" in done.stdout
    assert f"local: {tmp_path} is a folder" in done.stdout
    assert snapshot(tmp_path) == {"config.json", "tokenizer.json", "model.safetensors"}
    first, *more = [it for it in hub.asked if it.startswith("model.safetensors")]
    assert first == "model.safetensors"
    assert int(more[0].partition("bytes=")[2].rstrip("-")) > 9 * 10**6


def test_files_that_are_whole_are_not_fetched_again(tmp_path: Path, hub: Any) -> None:
    hub.failing = True
    failed = pull(tmp_path, hub, "chat")
    assert failed.exit_code == 1
    assert "whole files are kept" in failed.stderr
    hub.failing = False
    hub.asked.clear()
    assert pull(tmp_path, hub, "chat").exit_code == 0
    assert hub.asked == ["model.safetensors"]
    hub.asked.clear()
    assert pull(tmp_path, hub, "chat").exit_code == 0
    assert hub.asked == []


def test_pull_takes_the_revision_that_the_file_names(tmp_path: Path, hub: Any) -> None:
    done = pull(tmp_path, hub, "chat", revision="v1")
    assert f"commit {TAGGED}" in done.stdout, done.stderr
    assert "model.safetensors" in snapshot(tmp_path, TAGGED)


@pytest.mark.parametrize(
    ("arguments", "keys", "code", "words"),
    [
        (["chat"], {"revision": "nope"}, 1, "org/small at nope is not there: no such revision"),
        (["other"], {}, 1, "org/missing is not there, or is private"),
        (["nobody"], {}, 4, "one of chat, local, other"),
    ],
)
def test_what_cannot_be_fetched_is_refused_with_a_reason(
    tmp_path: Path, hub: Any, arguments: list[str], keys: dict[str, str], code: int, words: str
) -> None:
    refused = pull(tmp_path, hub, *arguments, **keys)
    assert (refused.exit_code, words in refused.stderr) == (code, True), refused.stderr
    assert "Traceback" not in refused.stderr
