from __future__ import annotations

import pytest

from daemon.ops.applied import HIDDEN
from daemon.ops.redaction import Redaction, is_secret_name


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abc.def-123",
        "authorization=bearer x1",
        "Basic dXNlcjpwYXNz",
        "key sk-proj-0123456789abcdef",
        "hf_abcdefghijklmnop",
        "ghp_0123456789abcdef",
        "https://user:pass@host/x",
        '{"api_key": "x1"}',
        "api-key: x1",
        "HF_TOKEN=x1",
        "CHAT_API_KEY = 'x1'",
        '{\\"password\\": \\"x1\\"}',
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    hidden = Redaction([]).text(text)
    assert HIDDEN in hidden
    for secret in ("abc.def", "x1", "dXNl", "0123456789", "abcdefghij", "pass@"):
        assert secret not in hidden


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt_tokens": 12, "completion_tokens": 7, "tokens_total": 19}',
        "sink_tokens: 4",
        "turbo8v4 on 36 of 36 layers, 56,448 bytes per token",
        "http://127.0.0.1:8081/v1",
        "spec 44781ce920e207b4",
    ],
)
def test_what_operators_need_stays(text: str) -> None:
    assert Redaction(["unrelated"]).text(text) == text


def test_known_secrets_are_hidden_in_every_spelling() -> None:
    secret = 'pä"ss wörd\\n\nsecond line of it\n'
    redaction = Redaction([secret])
    for spelled in (
        'pä"ss wörd\\n',
        'p\\u00e4\\"ss w\\u00f6rd\\\\n',
        "p%C3%A4%22ss%20w%C3%B6rd%5Cn",
        "second line of it",
    ):
        assert redaction.text(f"<{spelled}>") == f"<{HIDDEN}>"


def test_the_longer_of_two_secrets_goes_whole() -> None:
    assert Redaction(["abcd", "abcdefgh"]).text("abcdefgh abcd") == f"{HIDDEN} {HIDDEN}"


def test_documents_lose_secrets_in_values_names_and_under_names_that_tell() -> None:
    redaction = Redaction(["swordfish"])
    assert redaction.document(
        {"a": ["x swordfish", 1, None], "swordfish": True, "api_key": "zz", "tokens": 3}
    ) == {"a": [f"x {HIDDEN}", 1, None], HIDDEN: True, "api_key": HIDDEN, "tokens": 3}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HF_TOKEN", True), ("OPENAI_API_KEY", True), ("CHAT_KEY", True), ("db-password", True), ("AWS_SECRET_ACCESS_KEY", True),
        ("HOME", False), ("KEYBOARD", False), ("MONKEY", False), ("tokenizer", False), ("PATH", False),
    ],
)  # fmt: skip
def test_names_tell_what_holds_a_secret(name: str, expected: bool) -> None:
    assert is_secret_name(name) is expected
