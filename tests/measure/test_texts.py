from __future__ import annotations

from pathlib import Path

import pytest

from daemon.errors import TqdError
from daemon.measure import texts
from daemon.measure.texts import Text

BOS = 7


class Letters:
    """A tokenizer whose tokens are the code points of a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [ord(letter) for letter in text]


class Bare(Letters):
    """The same without a beginning-of-text token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=False)


TEXT = Text("letters", "".join(chr(1000 + index) for index in range(10_000)))


@pytest.mark.parametrize("tokenizer", [Letters(), Bare()])
def test_windows_begin_as_a_prompt_does_and_do_not_overlap(tokenizer: Letters) -> None:
    passages = texts.natural(tokenizer, TEXT, prompt=1536, count=4)

    assert {(passage.prompt, passage.score) for passage in passages} == {(1536, 128)}
    bodies = [set(passage.tokens) - {BOS} for passage in passages]
    assert sum(map(len, bodies)) == len(set.union(*bodies))
    starts_with_bos = [passage.tokens[0] == BOS for passage in passages]
    assert starts_with_bos == [not isinstance(tokenizer, Bare)] * 4


@pytest.mark.parametrize("prompt", [600, 1536])
def test_what_is_scored_in_the_copy_test_stands_far_back_in_the_same_prompt(prompt: int) -> None:
    for passage in texts.copies(Letters(), TEXT, prompt=prompt, count=2):
        scored = passage.tokens[passage.prompt :]
        where = [passage.tokens.index(token) for token in scored]
        assert len(scored) == texts.scored(prompt)
        assert passage.prompt - max(where) > prompt * 0.6
        assert where == list(range(where[0], where[0] + len(scored)))
        # the token that goes in first is the one before the first that is scored
        assert passage.tokens.index(passage.tokens[passage.prompt - 1]) == where[0] - 1


def test_the_copy_test_has_the_published_layout() -> None:
    (passage,) = texts.copies(Bare(), TEXT, prompt=1536, count=1)
    first = [ord(letter) for letter in TEXT.content[:512]]
    assert list(passage.tokens[:512]) == first
    assert list(passage.tokens[1504:]) == first[160:289]


def test_a_text_that_is_too_short_says_how_many_windows_it_has() -> None:
    with pytest.raises(TqdError, match="has 10,000 tokens; --windows 8 needs 13,3") as refusal:
        texts.natural(Letters(), TEXT, prompt=1536, count=8)
    assert refusal.value.hint == "write --windows 6"
    with pytest.raises(TqdError) as refusal:
        texts.natural(Letters(), Text("short", "abc"), prompt=1536, count=1)
    assert "longer text" in str(refusal.value.hint)


def test_a_file_that_cannot_be_read_as_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(TqdError, match="not UTF-8 text: byte 2"):
        texts.from_file(tmp_path / "a.txt")
    with pytest.raises(TqdError, match="cannot read"):
        texts.from_file(tmp_path / "b.txt")


def test_the_built_in_text_leaves_its_beginning_to_calibration() -> None:
    from pydoc_data.topics import topics

    text = texts.builtin()
    assert topics[min(topics)][:200] not in text.content
    assert len(text.content) > 200_000
    assert "pydoc_data.topics of Python 3" in text.name
