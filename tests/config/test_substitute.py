from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.substitute import BadReferenceError, has_reference, substitute

ENVIRON = {"A": "1", "EMPTY": "", "NESTED": "${env:A}", "BAD": "a\udcff"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", "plain"),
        ("${env:A}", "1"),
        ("x${env:A}y${env:A}", "x1y1"),
        ("${env:EMPTY}", ""),
        ("${env:EMPTY:-d}", ""),
        ("${env:NONE:-d}", "d"),
        ("${env:NONE:-}", ""),
        ("${env:NONE:-a:-b c}", "a:-b c"),
        ("$${env:A}", "${env:A}"),
        ("$$${env:A}", "$${env:A}"),
        ("$A {env:A} $", "$A {env:A} $"),
        ("${env:NESTED}", "${env:A}"),
    ],
)
def test_references(text: str, value: str) -> None:
    assert substitute(text, ENVIRON) == value


@pytest.mark.parametrize(
    "text",
    ["${", "${}", "${A}", "${env:}", "${env:1A}", "${env:A", "${env: A}", "${env:A-x}", "${ENV:A}"],
)
def test_a_reference_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(BadReferenceError, match="starts no reference"):
        substitute(text, ENVIRON)


def test_an_unset_variable_is_named() -> None:
    with pytest.raises(BadReferenceError, match="NONE is not set"):
        substitute("${env:NONE}", ENVIRON)


def test_a_variable_that_is_not_text_is_refused_without_its_value() -> None:
    with pytest.raises(BadReferenceError, match="BAD is not UTF-8 text") as caught:
        substitute("${env:BAD}", ENVIRON)
    assert "\udcff" not in str(caught.value)


@given(st.text())
def test_text_without_a_dollar_brace_is_left_alone(text: str) -> None:
    if "${" not in text:
        assert substitute(text, {}) == text
        assert not has_reference(text)
