"""How single tokens are spelled, for log-probabilities: the exact bytes, and text to show."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Protocol

_SPACE_MARK = "\u2581".encode()  # SentencePiece writes a space so


class SpellingTokenizer(Protocol):
    """What we use of a tokenizer to spell one token."""

    @property
    def detokenizer(self) -> object:
        """A streaming detokenizer; its class tells how the vocabulary is written."""
        ...

    def decode(self, token_ids: list[int], /) -> str:
        """Return the text of *token_ids*."""
        ...

    def get_added_vocab(self) -> Mapping[str, int]:
        """Return the tokens that are written literally: special ones and additions."""
        ...

    def __len__(self) -> int:
        """The number of tokens that can be spelled."""
        ...


class Vocabulary:
    """Spells tokens; knows byte-level BPE and SentencePiece vocabularies, decodes the rest."""

    def __init__(self, tokenizer: SpellingTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[str | bytes] | None = getattr(tokenizer.detokenizer, "tokenmap", None)
        self._added = {token: text for text, token in tokenizer.get_added_vocab().items()}
        self.size = len(tokenizer)

    def spell(self, token: int) -> bytes:
        """Return the bytes that *token* stands for; a part of a character is only its own bytes."""
        if token in self._added:
            return self._added[token].encode()
        if not 0 <= token < self.size:
            return b""
        if self._pieces is None:
            return self._tokenizer.decode([token]).encode()
        piece = self._pieces[token]
        if isinstance(piece, bytes):
            return piece.replace(_SPACE_MARK, b" ")
        table = _byte_level()
        return b"".join(bytes([table[c]]) if c in table else c.encode() for c in piece)


@cache
def _byte_level() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable bytes stand for themselves, the rest follow at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}
