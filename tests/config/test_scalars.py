from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.scalars import Value, resolve


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-3", -3), ("+3", 3), ("0", 0), ("1.5", 1.5), (".5", 0.5), ("1e3", 1000.0), ("-1.5E-1", -0.15),
        ("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None),
    ],
)  # fmt: skip
def test_what_every_yaml_reader_agrees_on(text: str, value: Value) -> None:
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


@pytest.mark.parametrize(
    "text",
    ["yes", "No", "on", "OFF", "y", "1:30", "3_8", "0123", "0x1F", "0o17", "1.", "e5", "-", ".", ".inf", ".nan",
     "1e999", "2001-01-01", "nUll", "tRue", "1 2", "=", "<<"],
)  # fmt: skip
def test_what_they_do_not_agree_on_is_text(text: str) -> None:
    assert resolve(text) == text


@given(st.text())
def test_any_text_resolves(text: str) -> None:
    resolve(text)


@given(st.integers(-(10**18) + 1, 10**18 - 1))
def test_integers_come_back(number: int) -> None:
    assert resolve(str(number)) == number
