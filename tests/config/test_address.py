from __future__ import annotations

import pytest

from daemon.config.address import Endpoint, bind_group, is_host, is_loopback, parse_endpoint


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:8700", Endpoint("127.0.0.1", 8700)),
        ("[::1]:1", Endpoint("::1", 1)),
        ("my-host.local:65535", Endpoint("my-host.local", 65535)),
    ],
)
def test_endpoints(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    "text", ["", "8700", ":8700", "localhost", "localhost:0", "localhost:65536", "::1:80", "a b:1", "1.2.3:80", "[x]:1", "http://a:1"]
)  # fmt: skip
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_endpoint(text)


def test_hosts() -> None:
    assert all(
        map(is_host, ["127.0.0.1", "::", "localhost", "a-b.example", "xn--bcher-kva.example"])
    )
    assert not any(
        map(is_host, ["", "1.2.3", "256.0.0.1", "-a", "a_b", "a b", "a:1", "a" * 254, "[::1]"])
    )


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "LocalHost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.example"]))


def test_spellings_of_one_address_share_a_group() -> None:
    assert len({bind_group(host) for host in ("localhost", "127.0.0.1", "::1", "LOCALHOST")}) == 1
    assert len({bind_group(host) for host in ("0.0.0.0", "::")}) == 1
    assert bind_group("10.0.0.1") != bind_group("10.0.0.2")
    assert bind_group("2001:db8::1") == bind_group("2001:DB8:0::1")
