"""The whole daemon in this process, as far as no worker is needed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import log
from daemon.paths import StateDir
from daemon.supervisor import main
from daemon.supervisor.control import ControlSocket
from tests.free_ports import free_port


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """A daemon sets up the log of its process."""
    yield
    log.configure()


def test_whoever_gets_an_answer_finds_the_status_endpoint_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    file = tmp_path / "servers.yaml"
    file.write_text(f"version: 1\ndaemon: {{status: '127.0.0.1:{port}'}}\nservers: {{}}\n")
    found: list[int] = []

    class Watched(ControlSocket):
        async def serve(self) -> None:
            with socket.socket() as client:
                found.append(client.connect_ex(("127.0.0.1", port)))
            await super().serve()
            self._commands.shut_down()

    monkeypatch.setattr(main, "ControlSocket", Watched)
    main.run(main.Options(file, StateDir(tmp_path / "state")))

    assert found == [0]
