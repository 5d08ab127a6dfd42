"""Who may talk to a worker."""

from __future__ import annotations

import pytest

from daemon.worker.access import (
    cors_headers,
    host_allowed,
    key_accepted,
    origin_allowed,
    preflight_headers,
)


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8001", "LocalHost.", "127.0.0.1:8001", "[::1]:8001", "10.0.0.7", None],
)
def test_local_names_and_literal_addresses_are_hosts(host: str | None) -> None:
    assert host_allowed(host, ["localhost"])


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "a:b:c",
        "localhost@evil.example",
    ],
)
def test_a_rebound_name_is_no_host(host: str) -> None:
    assert not host_allowed(host, ["localhost"])


@pytest.mark.parametrize("allowed", ["box.lan", "BOX.lan", "box.lan:8001", "*"])
def test_configured_hosts_are_allowed(allowed: str) -> None:
    assert host_allowed("Box.lan:8001", [allowed])


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173", "http://tauri.localhost",
        "app://obsidian.md", "tauri://localhost", "vscode-webview://1a2b",
    ],
)  # fmt: skip
def test_local_pages_and_applications_are_allowed_by_default(origin: str) -> None:
    assert origin_allowed(origin, "127.0.0.1:8001", ["localhost"])


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost.evil.example", "null", "", "file://", "http://a:b"],
)
def test_other_pages_are_not(origin: str) -> None:
    assert not origin_allowed(origin, "127.0.0.1:8001", ["localhost"])


@pytest.mark.parametrize("allowed", ["https://chat.example", "chat.example", "*"])
def test_configured_origins_are_allowed(allowed: str) -> None:
    assert origin_allowed("https://chat.example", "127.0.0.1:8001", [allowed])


def test_a_page_of_this_very_host_is_allowed() -> None:
    assert origin_allowed("https://chat.example", "chat.example", [])


def test_an_allowed_origin_is_echoed_and_caches_are_told() -> None:
    headers = cors_headers("http://localhost:3000", None, ["localhost"])
    assert headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert headers["Vary"] == "Origin"


def test_a_foreign_origin_gets_no_permission() -> None:
    assert cors_headers("https://evil.example", None, ["localhost"]) == {"Vary": "Origin"}


def test_a_preflight_names_authorization() -> None:
    headers = preflight_headers(None, private_network=False)
    assert "authorization" in headers["Access-Control-Allow-Headers"]
    assert "Access-Control-Allow-Private-Network" not in headers


def test_a_preflight_grants_what_was_asked_for() -> None:
    headers = preflight_headers("authorization, x-stainless-os", private_network=True)
    assert headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    assert headers["Access-Control-Allow-Private-Network"] == "true"


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [
        ("Bearer key", None),
        ("bearer  key", None),
        (None, "key"),
        ("Bearer other", "key"),
        ("Basic x", "key"),
    ],
)
def test_the_key_is_accepted_in_either_header(
    authorization: str | None, x_api_key: str | None
) -> None:
    assert key_accepted(authorization, x_api_key, "key")


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [
        (None, None),
        ("Bearer", None),
        ("Bearer other", None),
        ("key", None),
        (None, ""),
        ("Bearer \udce9", None),
    ],
)
def test_other_keys_are_refused(authorization: str | None, x_api_key: str | None) -> None:
    assert not key_accepted(authorization, x_api_key, "key")


@pytest.mark.parametrize("authorization", [None, "Bearer ", "Bearer dummy"])
def test_any_key_is_fine_where_none_is_set(authorization: str | None) -> None:
    assert key_accepted(authorization, None, None)
