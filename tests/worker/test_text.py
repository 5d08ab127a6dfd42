"""Tokens to text: whole characters, and no character of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.worker.requests import TokenEvent
from daemon.worker.text import Piece, TextStream
from tests.worker.small_tokenizer import byte_token, small_tokenizer


def stream(stop: Sequence[str] = (), context: Sequence[int] = ()) -> TextStream:
    tokenizer = small_tokenizer()
    return TextStream(tokenizer.detokenizer, vocab=len(tokenizer), stop=stop, context=context)


def tokens_of(text: str) -> list[int]:
    return small_tokenizer().encode(text, add_special_tokens=False)


def events_of(tokens: Sequence[int], finish: str | None = "stop") -> list[TokenEvent]:
    """Return *tokens* as events, ended by an end-of-sequence token or by the length."""
    if finish == "stop":
        return [*map(TokenEvent, tokens), TokenEvent(small_tokenizer().eos_token_id, "stop")]
    events = [TokenEvent(token) for token in tokens]
    if finish is not None:
        events[-1] = TokenEvent(tokens[-1], "length")
    return events


def feed_singly(text: TextStream, events: Sequence[TokenEvent]) -> list[Piece]:
    return [text.feed([event]) for event in events]


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_token_that_ends_a_sequence_shows_nothing() -> None:
    pieces = feed_singly(stream(), events_of(tokens_of("The capital")))
    assert joined(pieces) == "The capital"
    assert [piece.finish for piece in pieces[-2:]] == [None, "stop"]


def test_the_last_token_of_a_cut_sequence_is_shown() -> None:
    pieces = feed_singly(stream(), events_of(tokens_of("The capital"), "length"))
    assert joined(pieces) == "The capital"
    assert pieces[-1].finish == "length"


def test_characters_of_several_tokens_come_whole() -> None:
    tokens = [byte_token(byte) for byte in "é日😀".encode()]
    pieces = feed_singly(stream(), events_of(tokens))
    assert [piece.text for piece in pieces if piece.text] == ["é", "日", "😀"]


def test_invalid_bytes_become_replacement_characters_at_the_end() -> None:
    """B24: bytes that are no UTF-8 must not end a stream."""
    tokens = [*tokens_of("The"), byte_token(0xF0), byte_token(0x9F)]
    pieces = feed_singly(stream(), events_of(tokens))
    assert joined(pieces).startswith("The")
    assert set(joined(pieces)[3:]) == {"\ufffd"}
    assert pieces[-1].finish == "stop"


def test_endless_invalid_bytes_are_not_held_back_for_ever() -> None:
    text = stream()
    pieces = feed_singly(text, [TokenEvent(byte_token(0xFF))] * 30)
    assert joined(pieces).count("\ufffd") >= 20
    assert joined(feed_singly(text, events_of(tokens_of(" Paris")))).endswith(" Paris")


def test_tokens_outside_the_vocabulary_show_nothing() -> None:
    pieces = feed_singly(stream(), events_of([*tokens_of("The"), 10**6, *tokens_of(" capital")]))
    assert joined(pieces) == "The capital"


def test_a_continuation_keeps_its_leading_space() -> None:
    context = tokens_of("The capital")[-1:]
    assert (
        joined([stream(context=context).feed(events_of(tokens_of(" of France")))]) == " of France"
    )


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    tokens = tokens_of("The capital of France")
    pieces = feed_singly(stream(stop=["tal of F"]), events_of(tokens))
    assert joined(pieces) == "The capi"
    assert [piece.finish for piece in pieces].index("stop") == len(tokens) - 1


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    text = stream(stop=["capital"])
    piece = text.feed(events_of(tokens_of("The capital of France"), None))
    assert (piece.text, piece.finish) == ("The ", "stop")
    assert text.tokens == len(tokens_of("The capital"))


def test_a_prefix_of_a_stop_string_is_held_back_only_while_it_may_become_one() -> None:
    text = stream(stop=["capitalist"])
    pieces = feed_singly(text, events_of(tokens_of("The capital of"), None))
    assert joined(pieces[:-1]) == "The "
    assert joined(pieces) == "The capital of"


def test_a_held_back_prefix_is_shown_at_the_end() -> None:
    pieces = feed_singly(stream(stop=["capitalist"]), events_of(tokens_of("The capital")))
    assert joined(pieces) == "The capital"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stop_string_in_the_last_token_wins(finish: str) -> None:
    pieces = feed_singly(stream(stop=["tal"]), events_of(tokens_of("The capital"), finish))
    assert joined(pieces) == "The capi"
    assert pieces[-1].finish == "stop"


def test_the_earliest_of_several_stop_strings_ends_the_text() -> None:
    pieces = [stream(stop=["France", "of"]).feed(events_of(tokens_of("The capital of France")))]
    assert joined(pieces) == "The capital "


def test_shown_tokens_begin_where_their_text_begins() -> None:
    tokens = tokens_of("The capital of France")
    shown = [token for piece in feed_singly(stream(), events_of(tokens)) for token in piece.tokens]
    assert [token.event.token for token in shown] == tokens
    spelled = [small_tokenizer().decode([token]) for token in tokens]
    assert [token.offset for token in shown] == [
        len("".join(spelled[:i])) for i in range(len(tokens))
    ]


def test_tokens_of_a_stop_string_are_not_shown() -> None:
    pieces = feed_singly(stream(stop=[" of"]), events_of(tokens_of("The capital of France")))
    shown = [token.event.token for piece in pieces for token in piece.tokens]
    assert shown == tokens_of("The capital")


@given(
    text=st.text(alphabet="ab é😀", max_size=30),
    stops=st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=60),
)
def test_the_text_does_not_depend_on_how_the_tokens_arrive(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    tokens = [byte_token(byte) for byte in text.encode()]
    events = events_of(tokens)
    context = tokens_of("x")
    whole = stream(stop=stops, context=context).feed(events).text
    parts = stream(stop=stops, context=context)
    pieces = []
    while events:
        size = sizes.pop() if sizes else 1
        pieces.append(parts.feed(events[:size]))
        events = events[size:]
    assert joined(pieces) == whole
    assert text.startswith(whole)
    assert not any(stop in whole for stop in stops)
    assert whole == text or any(text[len(whole) :].startswith(stop) for stop in stops)
