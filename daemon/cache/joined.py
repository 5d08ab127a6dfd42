"""Rows of one layer that take decode steps together: a token each, and one kernel call for all of them.

What the rows have in full precision lives in one array meanwhile; their tiles stay where they are. Rows of
any lengths go together, nothing is padded to the longest, and nothing that grows with a row's length is
copied when one joins or leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import mlx.core as mx

from daemon.cache.row import Row
from daemon.cache.side import dtype_name
from daemon.kernels.attention import Attention
from daemon.kernels.case import Case, key_mean
from daemon.kernels.stepping import Leaving, Span, Stepper, no_tiles
from daemon.kernels.stored import RawSide

Fresh = tuple[mx.array, mx.array]

_N_TILES = attrgetter("n_tiles")


class Joined:
    """A number of rows that have lent their tokens in full precision; made by `join`.

    *going* is False once a row has taken its own back: then its owner makes another.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        plain: mx.array,
        left: Sequence[int],
        stepper: Stepper,
        case: Case,
        scale: float,
    ) -> None:
        self._case = case
        self._scale = scale
        self.going = True
        self._stepper = stepper
        self._plain = plain
        self._fresh: Fresh | None = None
        first = rows[0]
        self._sinks, self._tail, self._fold = (
            first.sink_tokens,
            first.tail_tokens,
            first.fold_tokens,
        )
        self._lengths = tuple(row.length for row in rows)
        self._grown = 0  # tokens of each row since then
        self._longest = max(self._lengths)
        self._spans = tuple(
            Span(length, *row.packed, left=gone)
            for row, length, gone in zip(rows, self._lengths, left, strict=True)
        )
        self._left = [index for index, gone in enumerate(left) if gone]
        layout = first.layout
        assert layout is not None, "a row that is joined has a layout"
        self._nothing = no_tiles(plain.shape[2], layout.words)
        self._tiles = [self._nothing if row.tiles is None else row.tiles for row in rows]
        self._due = [
            row.folds_at - length for row, length in zip(rows, self._lengths, strict=True)
        ]  # how many tokens each has got when the next one makes tokens leave its tail
        self._next_due = min(self._due)
        for index, row in enumerate(rows):
            row.lend(self, index)

    @property
    def lengths(self) -> tuple[tuple[int, ...], int]:
        """The tokens of each row some time ago, and how many each has got since: the same for many layers and steps."""
        return self._lengths, self._grown

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self._longest + self._grown

    @property
    def waiting(self) -> bool:
        """Whether a token has come that nothing has attended from yet."""
        return self._fresh is not None

    @property
    def due(self) -> bool:
        """Whether tokens leave the tail of a row before the next one comes."""
        return self._grown >= self._next_due

    def serves(self, queries: mx.array, scale: float, sinks: mx.array | None) -> bool:
        """Return whether its steps are like that of *queries*."""
        case = self._case
        return (
            scale == self._scale
            and queries.dtype == case.dtype
            and queries.shape[1] == case.n_heads
            and (sinks is not None) == case.learned_sinks
        )

    def length_of(self, index: int) -> int:
        """Return the tokens so far of the row at *index*."""
        return self._lengths[index] + self._grown

    def append(self, rows: Sequence[Row], keys: mx.array, values: mx.array) -> None:
        """Add one token to each of *rows*, those that were joined: *keys* and *values* are (B, H, 1, D).

        They must not be `waiting`.
        """
        if self.due:
            self.fold(rows)
        self._fresh = keys, values
        self._grown += 1

    def trim(self, count: int) -> bool:
        """Forget the newest *count* tokens of each row, if all of them are in a tail; return whether they were."""
        lengths = (self.length_of(index) - count for index in range(len(self._spans)))
        if self.waiting or not all(
            length >= max(span.packed_to, self._sinks, 1)
            for length, span in zip(lengths, self._spans, strict=True)
        ):
            return False
        self._grown -= count
        return True

    def attend(self, queries: mx.array, sinks: mx.array | None) -> mx.array:
        """Attend from *queries* (B, n_heads, 1, D), of the rows' newest tokens; returns an array like it."""
        out, self._plain = self._stepper.step(
            queries, self._fresh, self._plain, self._tiles, self._spans, self._grown, sinks
        )
        self._fresh = None
        if self._left:
            self._change({index: self._spans[index]._replace(left=0) for index in self._left})
            self._left = []
        return out

    def fold(self, rows: Sequence[Row]) -> None:
        """Move the tokens that are to leave the tail of any of *rows*, those that were joined, into its tiles."""
        leaving = [
            self._leaving(index) for index, due in enumerate(self._due) if due <= self._grown
        ]
        for _, some in groupby(sorted(leaving, key=_N_TILES), key=_N_TILES):
            together = tuple(some)
            tiles = self._stepper.fold(self._plain, together)
            for at, each in enumerate(together):
                row, span = rows[each.row], self._spans[each.row]
                end = max(span.packed_to, self._sinks) + each.tokens
                self._tiles[each.row] = self._nothing  # or writing to them would be copying them
                row.take_tiles(tiles[at], end)
                assert row.tiles is not None
                self._tiles[each.row] = row.tiles
                self._due[each.row] = row.folds_at - self._lengths[each.row]
        self._change(
            {
                each.row: self._spans[each.row]._replace(
                    packed_from=self._sinks,
                    packed_to=rows[each.row].packed[1],
                    left=self._spans[each.row].left + each.tokens,
                )
                for each in leaving
            }
        )
        self._left = [index for index, span in enumerate(self._spans) if span.left]
        self._next_due = min(self._due)

    def _leaving(self, index: int) -> Leaving:
        """Return the tokens that are to leave the tail of the row at *index*."""
        span = self._spans[index]
        start = max(span.packed_to, self._sinks)
        stop = (self.length_of(index) - self._tail) // self._fold * self._fold
        return Leaving(
            row=index,
            slot=self._sinks + span.left,
            first=0 if span.packed_to else self._sinks,
            tokens=stop - start,
            position=start + span.dropped,
        )

    def _change(self, spans: Mapping[int, Span]) -> None:
        self._spans = tuple(spans.get(index, span) for index, span in enumerate(self._spans))

    def parts_of(self, index: int) -> tuple[RawSide, RawSide]:
        """Return what the row at *index* holds in full precision, keys and values."""
        span = self._spans[index]
        stored = self.length_of(index) - self.waiting
        sinks = min(self._sinks, stored)
        begin = sinks + span.left
        end = begin + stored - max(span.packed_to, sinks)
        own = self._plain  # of a single row, or a copy: a slice would keep the others' alive
        if len(self._spans) > 1:
            own = mx.take(own, mx.array([index]), axis=0)
        k, v = (self._part(own[0, side], side, index, sinks, begin, end) for side in (0, 1))
        return k, v

    def _part(
        self, tokens: mx.array, side: int, index: int, sinks: int, begin: int, end: int
    ) -> RawSide:
        tail = [tokens[:, begin:end]] if end > begin else []
        head = tokens[:, :sinks] if sinks else None
        if self._fresh is not None:
            fresh = self._fresh[side][index]
            if sinks < self._sinks:
                head = fresh if head is None else mx.concatenate([head, fresh], axis=1)
            else:
                tail.append(fresh)
        if not tail:
            return RawSide(head, None)
        return RawSide(head, tail[0] if len(tail) == 1 else mx.concatenate(tail, axis=1))

    def taken(self, indices: Sequence[int]) -> tuple[mx.array, list[int]]:
        """Return the full-precision tokens of the rows at *indices*, none of them waiting, and how many have left each."""
        whole = list(indices) == list(range(len(self._spans)))
        plain = self._plain if whole else mx.take(self._plain, mx.array(list(indices)), axis=0)
        return plain, [self._spans[index].left for index in indices]

    @property
    def slots(self) -> int:
        """Room for tokens in full precision, of each row."""
        return self._plain.shape[3]

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that carries history, other than tiles."""
        return [self._plain, *(self._fresh or ())]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._plain.nbytes // len(self._spans)

    def end(self) -> None:
        """Take no more steps: a row goes on by itself, or with others."""
        self.going = False
        self._tiles = []  # or their next owner's writes would be copies


def join(
    rows: Sequence[Row], queries: mx.array, scale: float, sinks: mx.array | None
) -> Joined | None:
    """Return *rows* joined for steps like that of *queries* (B, n_heads, 1, D); None: they go one by one.

    They go together where the device has a kernel for it that has proved itself, and they are rows of one
    layer and policy whose tokens leave in whole tiles.
    """
    first = rows[0]
    attention = first.attention
    if not isinstance(attention, Attention) or not attention.steps:
        return None
    slots = first.sink_tokens + first.tail_tokens + first.fold_tokens
    name = dtype_name(queries)
    if not all(_fits(row, first, slots, name) for row in rows):
        return None
    layout = first.layout
    assert layout is not None, "a row that is joinable has a layout"
    case = Case(
        k=layout.k,
        v=layout.v,
        dim_k=layout.dim_k,
        dim_v=layout.dim_v,
        n_heads=queries.shape[1],
        n_kv_heads=first.shapes()[0][0],
        queries=1,
        dtype=queries.dtype,
        learned_sinks=sinks is not None,
        scaled_keys=first.keys is not None,
        key_mean=key_mean(first.keys),
    )
    stepper = attention.stepper(case, layout, first.keys, scale, len(rows))
    if stepper is None:
        return None
    parts = list(_plain_parts(rows, slots))
    plain = parts[0][0] if len(parts) == 1 else mx.concatenate([part for part, _ in parts])
    return Joined(rows, plain, [gone for _, left in parts for gone in left], stepper, case, scale)


def _fits(row: Row, first: Row, slots: int, dtype: str) -> bool:
    return (
        row.joinable
        and row.layout is first.layout
        and row.keys is first.keys
        and row.attention is first.attention
        and (row.sink_tokens, row.tail_tokens, row.fold_tokens)
        == (first.sink_tokens, first.tail_tokens, first.fold_tokens)
        and row.dtypes == (dtype, dtype)
        and row.full_precision <= slots
    )


def _plain_parts(rows: Sequence[Row], slots: int) -> Iterator[tuple[mx.array, list[int]]]:
    """Yield the full-precision tokens of *rows*: those that are together already at once, the others one by one."""
    for joined, some in groupby(rows, key=_together):
        if joined is None or joined.slots != slots:
            for row in some:
                yield _laid_out(row, slots), [0]
        else:
            yield joined.taken([row.loan[1] for row in some if row.loan is not None])


def _together(row: Row) -> Joined | None:
    joined = None if row.loan is None else row.loan[0]
    return joined if isinstance(joined, Joined) and not joined.waiting else None


def _laid_out(row: Row, slots: int) -> mx.array:
    """Return what *row* has in full precision, (1, 2, H, slots, D)."""
    stored = row.stored()
    sides = mx.stack([stored.k.joined(), stored.v.joined()])
    return mx.pad(sides, [(0, 0), (0, 0), (0, slots - sides.shape[2]), (0, 0)])[None]
