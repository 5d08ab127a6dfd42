"""Which addresses of a file can be had: by strangers, by our own daemon, by nobody."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from daemon.cli.ports import look_at_ports
from daemon.config.spec import DaemonSpec, ServerSpec
from daemon.ops.document import Document

SILENT = DaemonSpec(status=None)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        yield stranger.getsockname()[1]


def spec(port: int, **keys: object) -> ServerSpec:
    return ServerSpec.model_validate({"model": "m", "port": port} | keys)


def running(port: int, state: str = "ready", endpoint: str | None = None) -> Document:
    server: dict[str, Any] = {"endpoint": {"port": port}, "state": state}
    return cast("Document", {"servers": [server], "daemon": {"status_endpoint": endpoint}})


def test_a_port_that_a_stranger_has_is_named_with_its_holder(taken: int) -> None:
    ports = look_at_ports({"chat": spec(taken)}, SILENT, None)
    assert f"port {taken} is in use by pid {os.getpid()}" in ports.servers["chat"].message
    assert (ports.ours, ports.free, ports.endpoint) == ((), (), None)


def test_a_port_of_our_own_daemon_is_no_problem_for_any_server_of_the_file(taken: int) -> None:
    ports = look_at_ports({"new": spec(taken, host="localhost")}, SILENT, running(taken))
    assert ports.servers == {}
    assert ports.ours == (taken,)


@pytest.mark.parametrize("state", ["stopped", "failed", "blocked"])
def test_a_server_that_does_not_run_holds_nothing(taken: int, state: str) -> None:
    ports = look_at_ports({"chat": spec(taken)}, SILENT, running(taken, state))
    assert list(ports.servers) == ["chat"]


def test_a_disabled_server_needs_no_port(taken: int) -> None:
    assert look_at_ports({"chat": spec(taken, enabled=False)}, SILENT, None).servers == {}


def test_the_ops_endpoint_is_looked_at_too(taken: int) -> None:
    daemon = DaemonSpec(status=f"127.0.0.1:{taken}")
    ports = look_at_ports({}, daemon, None)
    assert ports.endpoint is not None
    ours = look_at_ports({}, daemon, running(1, endpoint=f"http://127.0.0.1:{taken}"))
    assert (ours.endpoint, ours.ours) == (None, (taken,))
