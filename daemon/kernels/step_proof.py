"""Proof that a device's decode steps work on it: a few small ragged rows through them and through the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

import mlx.core as mx

from daemon.kernels import encode, proof, reference
from daemon.kernels.case import Case
from daemon.kernels.packing import TILE
from daemon.kernels.stepping import Leaving, Span, Stepping, no_tiles
from daemon.kernels.stored import RawSide, Stored

_LEFT = 3  # slots of tokens that have left
_SLOTS = 48
_FEWEST = 3  # rows of which one has nothing packed, and two have not the same length


def problem(stepping: Stepping, case: Case, room: int) -> str | None:
    """Return what is wrong with steps of *case* by the kernel that has *room*, as the end of a sentence; None: nothing.

    Raises whatever the kernel raises.
    """
    whole = proof.sample(case)
    stepper = stepping.stepper(case, whole.stored.layout, whole.stored.keys, whole.scale)
    if stepper is None:
        return None  # never asked for; and sides of two kinds would not go into one array
    given = sample(whole, _rows(stepping, room))
    out, plain = stepper.step(
        given.queries, given.fresh, given.plain, given.tiles, given.spans, 0, given.sinks
    )
    folded = stepper.fold(plain, given.leaving)
    expected = mx.stack(
        [
            reference.attend(queries, row, given.scale, None, given.sinks)
            for queries, row in zip(given.queries, given.rows, strict=True)
        ]
    )
    wrong = proof.difference(out, expected, case)
    if wrong is not None:
        return wrong
    for index, row in enumerate(given.rows):
        for side, raw in enumerate((row.k, row.v)):
            tokens = raw.joined()
            if not mx.array_equal(plain[index, side, :, : tokens.shape[1]], tokens):
                return "lose tokens at decode steps on this device"
    layout = given.rows[0].layout
    for at, leaving in enumerate(given.leaving):
        wrong = encode.difference(folded[at], _encoded(given, plain, leaving), layout)
        if wrong is not None:
            return wrong
    return None


@dataclass(frozen=True, slots=True)
class Sample:
    """The arguments of one step, and what its rows hold with the newest token."""

    queries: mx.array
    fresh: tuple[mx.array, mx.array]
    plain: mx.array
    tiles: list[mx.array]
    spans: tuple[Span, ...]
    scale: float
    sinks: mx.array | None
    rows: list[Stored]
    leaving: tuple[Leaving, ...]


def sample(whole: proof.Sample, rows: int) -> Sample:
    """Return a step of *rows* like *whole*: of many lengths, with slots of tokens that have left, one all in full precision."""
    nothing = no_tiles(whole.stored.n_kv_heads, whole.stored.layout.words)
    made = [_row(whole.stored, index) for index in range(rows)]
    last = [(row.k.joined()[:, -1:], row.v.joined()[:, -1:]) for row in made]
    shape = (rows, *whole.queries.shape)
    return Sample(
        queries=mx.random.normal(shape, key=mx.random.key(rows)).astype(whole.queries.dtype),
        fresh=(mx.stack([k for k, _ in last]), mx.stack([v for _, v in last])),
        plain=mx.stack([_plain(row) for row in made]),
        tiles=[nothing if row.tiles is None else row.tiles for row in made],
        spans=tuple(
            Span(row.length, row.packed_from, row.packed_to, row.dropped, _left(row))
            for row in made
        ),
        scale=whole.scale,
        sinks=whole.sinks,
        rows=made,
        leaving=tuple(
            Leaving(row=index, slot=2 + index, first=first, tokens=20, position=1000 * index)
            for index, first in enumerate((0, 12)[:rows])
        ),
    )


def _row(whole: Stored, index: int) -> Stored:
    """Return what is *stored* with some of the tail missing, and every other row without anything packed."""
    tails = [side.tail for side in (whole.k, whole.v)]
    missing = index % 7
    k, v = (None if tail is None else tail[:, missing:] for tail in tails)
    sinks = whole.packed_from
    if index % 2:
        length = sinks + whole.length - whole.packed_to - missing
        return replace(
            whole, length=length, packed_from=0, packed_to=0, tiles=None, dropped=0,
            k=RawSide(whole.k.head, k), v=RawSide(whole.v.head, v),
        )  # fmt: skip
    packed_to = whole.packed_to - TILE * (index % 5)
    length = packed_to + whole.length - whole.packed_to - missing
    return replace(
        whole, length=length, packed_to=packed_to,
        k=RawSide(whole.k.head, k), v=RawSide(whole.v.head, v),
    )  # fmt: skip


def _left(row: Stored) -> int:
    return _LEFT if row.packed_to else 0


def _plain(row: Stored) -> mx.array:
    """Return what of *row* is in full precision, but for its newest token, with the slots of tokens that have left."""
    sides = mx.stack([row.k.joined()[:, :-1], row.v.joined()[:, :-1]])
    sinks, left = row.packed_from, _left(row)
    gone = mx.full((*sides.shape[:2], left, sides.shape[3]), mx.nan, dtype=sides.dtype)
    sides = mx.concatenate([sides[:, :, :sinks], gone, sides[:, :, sinks:]], axis=2)
    return mx.pad(sides, [(0, 0), (0, 0), (0, _SLOTS - sides.shape[2]), (0, 0)])


def _encoded(given: Sample, plain: mx.array, leaving: Leaving) -> mx.array:
    """Return the tiles of *leaving* as the reference makes them."""
    row, slot = leaving.row, leaving.slot
    k, v = plain[row][:, :, slot : slot + leaving.tokens]
    keys = given.rows[0].keys
    if keys is not None:
        k = keys.centered(k, leaving.position)
    return encode.encoded(k, v, given.rows[0].layout, first=leaving.first, old=None)


def _rows(stepping: Stepping, room: int) -> int:
    """Return the fewest rows that are served by the kernel that has *room*, if they are ragged."""
    return max(next(n for n in count(1) if stepping.room_for(n) == room), min(room, _FEWEST))
