"""Whether a model still finds one sentence in a long context, read at once or from a cached prefix.

A sentence with a number stands at some depth of a text; the text ends in the beginning of the same
sentence, and the model goes on greedily. Caches are filled as a server fills them, chunk by chunk and
packed under the policy meanwhile. Read *fresh*, text and question are one prompt, as at a miss of a prompt
cache. *Continued*, the text alone was read before, and a copy of its caches reads the question, as at a hit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from daemon.measure import divergence

DEPTHS = (10, 50, 90)  # percent of the context before the sentence

_SENTENCE = "\n\nThe secret number of the lighthouse keeper is {number}.\n\n"
_QUESTION = "\n\nThe secret number of the lighthouse keeper is"
_NUMBERS = (48151, 62342, 90817)
_ANSWER_TOKENS = 10  # a space and five digits, also where each digit is a token


@dataclass(frozen=True)
class Haystack:
    """Tokens of a text with its needle, and of the question."""

    depth: int
    number: int
    text: tuple[int, ...]
    question: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Whether the number of the needle at *depth* percent came back."""

    depth: int
    fresh: bool
    continued: bool


def haystack(tokenizer: Any, tokens: Sequence[int], index: int) -> Haystack:
    """Hide needle number *index* in *tokens*, a passage of natural text; with the question it is as long as that."""
    depth, number = DEPTHS[index], _NUMBERS[index]
    needle = tokenizer.encode(_SENTENCE.format(number=number), add_special_tokens=False)
    question = tokenizer.encode(_QUESTION, add_special_tokens=False)
    kept = tokens[: max(2, len(tokens) - len(needle) - len(question))]
    at = max(1, len(kept) * depth // 100)  # after a beginning-of-text token
    return Haystack(depth, number, (*kept[:at], *needle, *kept[at:]), tuple(question))


def find(model: Any, tokenizer: Any, hay: Haystack, make_caches: Callable[[], list[Any]]) -> Found:
    """Ask *model* for the needle of *hay* over caches that *make_caches* gives empty."""
    chunk = divergence.PREFILL_CHUNK
    whole = len(hay.text) // chunk * chunk  # both ways have read so much when they part
    cached = make_caches()
    divergence.feed(model, hay.text[:whole], cached)
    fresh = copy.deepcopy(cached)
    divergence.feed(model, (*hay.text[whole:], *hay.question[:-1]), fresh)
    divergence.feed(model, hay.text[whole:], cached)
    continued = copy.deepcopy(cached)
    divergence.feed(model, hay.question[:-1], continued)
    fresh_text, continued_text = (
        tokenizer.decode(_greedy(model, hay.question[-1], caches)) for caches in (fresh, continued)
    )
    return Found(hay.depth, str(hay.number) in fresh_text, str(hay.number) in continued_text)


def _greedy(model: Any, token: int, caches: list[Any]) -> list[int]:
    tokens = []
    for _ in range(_ANSWER_TOKENS):
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        token = cast("int", mx.argmax(logits).item())
        tokens.append(token)
    return tokens
