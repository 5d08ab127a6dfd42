"""Tokens are spelled exactly, for every way in which a vocabulary is written."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from daemon.worker.vocabulary import Vocabulary
from tests.worker.small_tokenizer import EOS, byte_token, small_tokenizer


@dataclass
class Pieces:
    """A tokenizer whose detokenizer has this token map; without one tokens are decoded."""

    pieces: list[bytes] | None

    @property
    def detokenizer(self) -> object:
        return type("Detokenizer", (), {} if self.pieces is None else {"tokenmap": self.pieces})

    def decode(self, token_ids: list[int], /) -> str:
        return f"<{token_ids[0]}>"

    def get_added_vocab(self) -> dict[str, int]:
        return {"<s>": 0}

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("text", ["The capital", "naïve 日本 😀", "\n\t"])
def test_byte_level_tokens_spell_the_text_they_encode(text: str) -> None:
    tokenizer = small_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(vocabulary.spell, tokens)) == text.encode()


def test_every_byte_has_its_token() -> None:
    vocabulary = Vocabulary(small_tokenizer())
    assert [vocabulary.spell(byte_token(byte)) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]


def test_special_tokens_are_spelled_literally() -> None:
    tokenizer = small_tokenizer()
    assert Vocabulary(tokenizer).spell(tokenizer.eos_token_id) == EOS.encode()


def test_sentencepiece_marks_are_spaces() -> None:
    vocabulary = Vocabulary(Pieces([b"<s>", "\u2581the".encode(), b"\xff"]))
    assert [vocabulary.spell(token) for token in range(3)] == [b"<s>", b" the", b"\xff"]


def test_other_vocabularies_are_decoded() -> None:
    assert Vocabulary(Pieces(None)).spell(2) == b"<2>"


def test_a_token_that_no_text_has_spells_nothing() -> None:
    assert Vocabulary(small_tokenizer()).spell(10**6) == b""
