"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence

from daemon.worker.text import Shown
from daemon.worker.vocabulary import Vocabulary

# JSON has no infinity; OpenAI's own answers stand at this for a token that cannot be.
LOWEST = -9999.0


def chat_logprobs(tokens: Sequence[Shown], vocabulary: Vocabulary) -> dict[str, object]:
    """Return the `logprobs` of a chat choice: each token with its bytes and its alternatives."""
    content = [
        _entry(shown.event.token, shown.event.logprob, vocabulary)
        | {"top_logprobs": [_entry(token, value, vocabulary) for token, value in shown.event.top]}
        for shown in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[Shown], vocabulary: Vocabulary, *, top: int
) -> dict[str, object]:
    """Return the `logprobs` of a completion choice; without *top* alternatives there are none to list."""
    return {
        "tokens": [_text(shown.event.token, vocabulary) for shown in tokens],
        "token_logprobs": [_finite(shown.event.logprob) for shown in tokens],
        "top_logprobs": [_alternatives(shown, vocabulary) for shown in tokens] if top else None,
        "text_offset": [shown.offset for shown in tokens],
    }


def _alternatives(shown: Shown, vocabulary: Vocabulary) -> dict[str, float]:
    """Return the likeliest tokens by their text, the sampled one always among them."""
    values = {_text(token, vocabulary): _finite(value) for token, value in shown.event.top}
    values.setdefault(_text(shown.event.token, vocabulary), _finite(shown.event.logprob))
    return values


def _entry(token: int, value: float | None, vocabulary: Vocabulary) -> dict[str, object]:
    spelled = vocabulary.spell(token)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": _finite(value),
        "bytes": list(spelled),
    }


def _text(token: int, vocabulary: Vocabulary) -> str:
    return vocabulary.spell(token).decode("utf-8", "replace")


def _finite(value: float | None) -> float:
    return value if value is not None and value > LOWEST else LOWEST
