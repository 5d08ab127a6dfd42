from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from daemon.measure import needle


class Letters:
    """A tokenizer whose tokens are the code points of a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Searcher:
    """A model that goes on as the text went on after its newest four tokens stood there before.

    Its cache holds the tokens themselves; it remembers the newest *memory* of them.
    """

    layers = (None,)

    def __init__(self, memory: int = 10_000) -> None:
        self._memory = memory

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        (layer,) = cache
        vectors = tokens.astype(mx.float32).reshape(1, 1, -1, 1)
        keys, _ = layer.update_and_fetch(vectors, vectors)
        seen = [int(token) for token in keys[0, 0, :, 0].tolist()][-self._memory :]
        places = [at for at in range(len(seen) - 4) if seen[at : at + 4] == seen[-4:]]
        guess = seen[places[0] + 4] if places else ord("?")
        logits = mx.zeros((1, tokens.shape[1], 128))
        logits[:, -1, guess] = 1.0
        return logits


TOKENS = [97 + (index * 7) % 26 for index in range(600)]


@pytest.mark.parametrize("index", range(3))
def test_a_needle_is_found_at_every_depth_where_nothing_is_lost(index: int) -> None:
    model, tokenizer = Searcher(), Letters()
    hay = needle.haystack(tokenizer, TOKENS, index)

    found = needle.find(model, tokenizer, hay, lambda: [KVCache()])

    assert found == needle.Found(hay.depth, True, True)


def test_what_was_forgotten_is_not_found() -> None:
    """Nothing in the question gives the number away."""
    model, tokenizer = Searcher(memory=250), Letters()
    found = [
        needle.find(
            model, tokenizer, needle.haystack(tokenizer, TOKENS, index), lambda: [KVCache()]
        )
        for index in range(3)
    ]

    assert [(it.fresh, it.continued) for it in found] == [
        (False, False),
        (False, False),
        (True, True),
    ]


def test_the_haystack_is_as_long_as_the_passage() -> None:
    hay = needle.haystack(Letters(), TOKENS, 0)

    assert len(hay.text) + len(hay.question) == len(TOKENS)
    assert hay.depth == 10


class Reading(KVCache):
    """A cache that notes how many tokens arrive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[int] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.chunks.append(keys.shape[2])
        return super().update_and_fetch(keys, values)


def test_text_and_question_are_one_prompt_when_fresh_and_two_when_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caches that are asked have read just what a server's would have, in the same chunks."""
    asked: list[Reading] = []
    greedy = needle._greedy

    def watched(model: Any, token: int, caches: list[Any]) -> list[int]:
        asked.append(copy.deepcopy(caches[0]))
        return greedy(model, token, caches)

    monkeypatch.setattr(needle, "_greedy", watched)
    hay = needle.haystack(Letters(), TOKENS, 0)
    needle.find(Searcher(), Letters(), hay, lambda: [Reading()])

    fresh, continued = asked
    text, question = len(hay.text), len(hay.question) - 1
    assert fresh.chunks == [512, text - 512 + question]
    assert continued.chunks == [512, text - 512, question]
    assert fresh.offset == continued.offset == text + question
