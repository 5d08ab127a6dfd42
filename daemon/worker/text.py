"""Tokens to text: whole characters only, and never a character of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from daemon.worker.requests import FinishReason, TokenEvent

# A UTF-8 character has at most 4 bytes, so 4 tokens; text held back for longer is not going to become valid.
_HELD_TOKENS_LIMIT = 8
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """What we use of mlx-lm's streaming detokenizers."""

    @property
    def last_segment(self) -> str:
        """The text that became readable since the last look."""
        ...

    def add_token(self, token: int) -> None:
        """Take one more token."""
        ...

    def finalize(self) -> None:
        """Make readable what was held back for more tokens."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """One token whose text was released; *offset* is where in the text it begins, in characters."""

    event: TokenEvent
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a batch of tokens adds to the answer."""

    text: str = ""
    tokens: tuple[Shown, ...] = ()
    finish: FinishReason | None = None


class TextStream:
    """The text of one sequence, released as soon as it can no longer become a stop string.

    *vocab* is the number of tokens that the tokenizer can spell; a model may have more. *context*, the tokens
    in front of the first generated one, keeps the leading space of a continuation; a chat answer has none.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        vocab: int,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._vocab = vocab
        self._stop = tuple(stop)
        self._pending = ""  # readable, not yet released
        self._released = 0  # characters
        self._unshown: list[tuple[Shown, int]] = []  # with the offset of the token's end
        self._held_tokens = 0
        self.tokens = 0
        self.finish: FinishReason | None = None
        for token in context:
            self._read(token)
        self._pending = ""

    def feed(self, events: Sequence[TokenEvent]) -> Piece:
        """Take the next tokens and return what may be shown; tokens behind the end are dropped."""
        for event in events:
            if self.finish is not None:
                break
            self.tokens += 1
            self._take(event)
        return self._release()

    def _take(self, event: TokenEvent) -> None:
        if event.finish != "stop":
            start = self._released + len(self._pending)
            self._read(event.token)
            end = self._released + len(self._pending)
            self._unshown.append((Shown(event, start), end))
        if event.finish is not None:
            self._flush()
        cut = min(
            (at for stop in self._stop if (at := self._pending.find(stop)) >= 0), default=None
        )
        if cut is not None:
            self._pending = self._pending[:cut]
            self.finish = "stop"
        else:
            self.finish = event.finish

    def _read(self, token: int) -> None:
        if not 0 <= token < self._vocab:
            return
        self._detokenizer.add_token(token)
        segment = self._detokenizer.last_segment
        self._pending += segment
        self._held_tokens = 0 if segment else self._held_tokens + 1
        if self._held_tokens > _HELD_TOKENS_LIMIT:
            self._flush()

    def _flush(self) -> None:
        self._held_tokens = 0
        try:
            self._detokenizer.finalize()
        except KeyError:  # mlx-lm's byte-level detokenizer, on a held piece that is not byte-level
            self._detokenizer.reset()
            self._pending += _REPLACEMENT
        else:
            self._pending += self._detokenizer.last_segment

    def _release(self) -> Piece:
        held = 0 if self.finish is not None else _possible_stop(self._pending, self._stop)
        text = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(text) :]
        self._released += len(text)
        if self.finish is None:
            shown = [token for token, end in self._unshown if end <= self._released]
        else:  # behind a stop string only the tokens that begin in front of it count
            shown = [
                token
                for token, end in self._unshown
                if end <= self._released or token.offset < self._released
            ]
        del self._unshown[: len(shown)]
        return Piece(text, tuple(shown), self.finish)


def _possible_stop(text: str, stops: Sequence[str]) -> int:
    """Return how many of the last characters of *text* may be the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
