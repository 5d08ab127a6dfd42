from __future__ import annotations

import asyncio
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Coroutine
from typing import Any

import pytest

from daemon.config.spec import ServerSpec
from daemon.supervisor.listeners import Listener
from daemon.supervisor.server import Address, Cause, Server, State
from daemon.supervisor.sockets import AddressTakenError, Sockets, bind


@pytest.fixture
def here() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return Address("127.0.0.1", probe.getsockname()[1])


def held(address: Address, away: Server | None = None) -> dict[Address, Listener]:
    return {address: Listener(address, "chat", away)}


def is_open(address: Address) -> bool:
    with socket.socket() as client:
        return client.connect_ex((address.host, address.port)) == 0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_wanted_address_is_held_and_an_unwanted_one_closed(here: Address) -> None:
    async def work() -> None:
        sockets = Sockets(lambda: 0.0)
        assert await sockets.arrange(held(here)) == {}
        assert is_open(here)
        await sockets.arrange({})
        assert not is_open(here)

    run(work())


def test_a_taken_port_names_its_holder(here: Address) -> None:
    async def work() -> None:
        sockets = Sockets(lambda: 0.0)
        with socket.create_server((here.host, here.port)):
            refused = await sockets.arrange(held(here))
            with pytest.raises(AddressTakenError, match=f"port {here.port} is in use"):
                sockets.reserve(here)
        assert f"by pid {os.getpid()}" in refused[here].message
        assert sockets.get(here) is None

    run(work())


def test_a_reservation_outlives_an_arrangement_until_it_is_settled(here: Address) -> None:
    async def work() -> None:
        sockets = Sockets(lambda: 0.0)
        sockets.reserve(here)
        await sockets.arrange({})
        assert is_open(here)
        sockets.settle()
        await sockets.arrange({})
        assert not is_open(here)

    run(work())


def test_a_port_of_ours_is_no_obstacle_to_a_reservation(here: Address) -> None:
    async def work() -> None:
        sockets = Sockets(lambda: 0.0)
        await sockets.arrange(held(here))
        sockets.reserve(Address("0.0.0.0", here.port))
        await sockets.close()

    run(work())


def test_trying_an_address_out_never_listens_there(here: Address) -> None:
    async def work() -> None:
        sockets = Sockets(lambda: 0.0)
        sockets.try_out(here)
        assert sockets.get(here) is None
        taken = pytest.raises(AddressTakenError, match=f"port {here.port} is in use by pid")
        with socket.create_server((here.host, here.port)), taken:
            sockets.try_out(here)
        await sockets.arrange(held(here))
        sockets.try_out(here)  # ours
        await sockets.close()

    run(work())


def test_while_a_server_is_away_the_supervisor_answers_and_the_socket_stays(here: Address) -> None:
    server = Server(
        "chat",
        ServerSpec(model="m", port=here.port),
        "hash",
        state=State.BACKOFF,
        cause=Cause("crashed", "exited with 1"),
        attempt_at=112.0,
    )

    def ask() -> tuple[int, str, dict[str, Any]]:
        request = urllib.request.Request(f"http://{here}/v1/chat/completions", data=b"{}")
        with pytest.raises(urllib.error.HTTPError) as answer, urllib.request.urlopen(request):
            pass
        with answer.value as error:
            return error.code, error.headers["Retry-After"], json.loads(error.read())

    async def work() -> None:
        sockets = Sockets(lambda: 100.0)
        await sockets.arrange(held(here, server))
        status, retry_after, body = await asyncio.to_thread(ask)
        assert (status, retry_after) == (503, "12")
        assert body["error"]["message"] == (
            "server chat is backoff: exited with 1; next attempt in 12 s"
        )
        await sockets.arrange(held(here))
        kept = sockets.get(here)
        assert kept is not None
        assert kept.fileno() != -1
        assert is_open(here)
        await sockets.close()

    run(work())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (Address("no.such.host.invalid", 8081), "cannot be resolved"),
        (Address("192.0.2.1", 8081), "cannot listen on 192.0.2.1:8081"),
    ],
)
def test_a_host_that_is_not_ours_is_refused_in_words(address: Address, message: str) -> None:
    with pytest.raises(AddressTakenError, match=message) as refusal:
        bind(address)
    assert "127.0.0.1" in (refusal.value.hint or "")


def test_localhost_is_127_0_0_1() -> None:
    with bind(Address("localhost", 0)) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
