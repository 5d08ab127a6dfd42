"""Whether a model still finds one sentence in a long context, read at once or from a cached prefix.

A sentence with a number stands at some depth of a text; the text ends in the beginning of the same
sentence, and the model goes on greedily. Read *fresh*, the whole prompt is prefilled exactly and packed
afterwards, as at a miss of the prompt cache. *Continued*, the text is packed before the question is read,
as at a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from daemon.measure import divergence
from daemon.measure.divergence import MakeRow

DEPTHS = (10, 50, 90)  # percent of the context before the sentence

_SENTENCE = "\n\nThe secret number of the lighthouse keeper is {number}.\n\n"
_QUESTION = "\n\nThe secret number of the lighthouse keeper is"
_NUMBERS = (48151, 62342, 90817)
_ANSWER_TOKENS = 10  # a space and five digits, also where each digit is a token


@dataclass(frozen=True)
class Haystack:
    """A prefilled text with its needle, and the same with the question behind it, less the last token."""

    depth: int
    number: int
    text_caches: tuple[Any, ...]
    whole_caches: tuple[Any, ...]
    question: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Whether the number of the needle at *depth* percent came back."""

    depth: int
    fresh: bool
    continued: bool


def haystack(model: Any, tokenizer: Any, tokens: Sequence[int], index: int) -> Haystack:
    """Hide needle number *index* in *tokens*, a passage of natural text, and let *model* read it."""
    depth, number = DEPTHS[index], _NUMBERS[index]
    needle = tokenizer.encode(_SENTENCE.format(number=number), add_special_tokens=False)
    question = tokenizer.encode(_QUESTION, add_special_tokens=False)
    kept = tokens[: max(2, len(tokens) - len(needle) - len(question))]
    at = max(1, len(kept) * depth // 100)  # after a beginning-of-text token
    text = [*kept[:at], *needle, *kept[at:]]
    caches = divergence.prefill_all(model, text)
    whole = divergence.converted(caches, divergence.exact)
    divergence.feed(model, question[:-1], whole)
    return Haystack(depth, number, caches, tuple(whole), tuple(question))


def find(model: Any, tokenizer: Any, hay: Haystack, make_row: MakeRow) -> Found:
    """Ask for the needle of *hay* over caches that are packed as *make_row* says."""
    fresh = divergence.converted(hay.whole_caches, make_row)
    continued = divergence.converted(hay.text_caches, make_row)
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
