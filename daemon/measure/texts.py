"""The text that a measurement runs on, and how it is cut into windows of tokens.

Without a file of the user's it is the Python standard library's own documentation of the language,
which every Python brings along: no download, but nobody's own text either.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.errors import TqdError

MOST_SCORED = 128  # positions scored in a window

# Key statistics of a model may be measured on the beginning of the built-in text; what is scored must be other text.
_UNSCORED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Text:
    """A text and what to call it."""

    name: str
    content: str


@dataclass(frozen=True, slots=True)
class Passage:
    """The tokens of a window; the last *score* of them are to be predicted from what stands before each."""

    tokens: tuple[int, ...]
    score: int

    @property
    def prompt(self) -> int:
        """The number of tokens before the first one that is predicted."""
        return len(self.tokens) - self.score


def builtin() -> Text:
    """Return the last three quarters of `pydoc_data.topics`."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[key] for key in sorted(topics))
    name = f"pydoc_data.topics of Python {platform.python_version()}"
    return Text(name, whole[int(len(whole) * _UNSCORED_SHARE) :])


def from_file(path: Path) -> Text:
    """Return the text in *path*.

    Raises:
        TqdError: it cannot be read, or is not UTF-8.
    """
    try:
        return Text(path.name, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TqdError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TqdError(
            f"{path} is not UTF-8 text: byte {error.start}",
            hint="convert it, or name a plain text file",
        ) from error


def scored(prompt: int) -> int:
    """Return how many positions are scored after a prompt of *prompt* tokens: 128 after 1,536."""
    return max(1, min(MOST_SCORED, prompt // 12))


def natural(tokenizer: Any, text: Text, *, prompt: int, count: int) -> list[Passage]:
    """Return *count* passages of *text* that do not overlap, spread evenly over it.

    Each begins as a prompt of the model does, with its beginning-of-text token where it has one.

    Raises:
        TqdError: the text is too short.
    """
    start = _beginning(tokenizer)
    score = scored(prompt)
    parts = _spread(tokenizer, text, size=prompt + score - len(start), count=count)
    return [Passage((*start, *part), score) for part in parts]


def copies(tokenizer: Any, text: Text, *, prompt: int, count: int) -> list[Passage]:
    """Return *count* passages that end in a repetition of something about two thirds of the prompt back.

    A window is A[:n] + B + A[5n/16:], n a third of the prompt, A and B neighbours in *text*: what is scored
    can only be known from packed tokens. With 1,536 tokens of prompt, 512 of A, 992 of B, from A[160].

    Raises:
        TqdError: the text is too short.
    """
    start = _beginning(tokenizer)
    score = scored(prompt)
    first = prompt // 3
    between = prompt - first - prompt // 48 - len(start)
    again = first * 5 // 16
    parts = _spread(tokenizer, text, size=prompt + score, count=count)
    return [
        Passage(
            (*start, *part[:first], *part[first : first + between], *part[again : again + score + 1]),
            score,
        )
        for part in parts
    ]  # fmt: skip


def _beginning(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that *tokenizer* puts before a text."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    return tuple(full[: full.index(plain[0])]) if plain and plain[0] in full else ()


def _spread(tokenizer: Any, text: Text, *, size: int, count: int) -> list[Sequence[int]]:
    tokens: list[int] = tokenizer.encode(text.content, add_special_tokens=False)
    fitting = len(tokens) // size
    if fitting < count:
        raise TqdError(
            f"{text.name} has {len(tokens):,} tokens; --windows {count} needs {count * size:,}",
            hint=f"write --windows {fitting}" if fitting else "use a longer text, or a shorter context",
        )  # fmt: skip
    step = len(tokens) // count
    return [tokens[index * step : index * step + size] for index in range(count)]
