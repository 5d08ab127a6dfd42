"""Decode steps of several rows of one layer at once, a token each: what a device may offer beside `attend`.

The rows' tokens in full precision are together in one array, *plain*: (B, 2, H, slots, D), keys and values,
each row's sinks first and its tail behind them. A step gives a new one, with the newest token in it. Each
row's tiles are an array of their own, as long as the row needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import mlx.core as mx

from daemon.kernels.case import Case
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE, TileLayout


class Span(NamedTuple):
    """Where the tokens of one row are.

    Tokens 0 to *length*, of which those from *packed_from* to *packed_to* are in tiles; token p was computed
    at position p + *dropped*. *left* tokens after the sinks have gone into tiles since *plain* was written:
    their slots are still there.
    """

    length: int
    packed_from: int
    packed_to: int
    dropped: int = 0
    left: int = 0


class Leaving(NamedTuple):
    """Tokens of one row that leave *plain* for tiles: *tokens* from *slot* on, into a tile's slots from *first* on.

    The first of them was computed at *position*.
    """

    row: int
    slot: int
    first: int
    tokens: int
    position: int

    @property
    def n_tiles(self) -> int:
        """Tiles that they come to lie in."""
        return -(-(self.first + self.tokens) // TILE)


@cache
def no_tiles(n_kv_heads: int, words: int) -> mx.array:
    """Return what stands for the tiles of a row that has none, uint32 (KV heads, 1, words): read perhaps, but of no account.

    A kernel may ask for a row's first tile before it knows how many there are.
    """
    return mx.zeros((n_kv_heads, 1, words), dtype=mx.uint32)


class Stepper(Protocol):
    """Decode steps of one layer, for one kind of call."""

    def step(
        self,
        queries: mx.array,
        fresh: tuple[mx.array, mx.array] | None,
        plain: mx.array,
        tiles: Sequence[mx.array],
        spans: tuple[Span, ...],
        grown: int,
        sinks: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """Attend from each row's newest token, and take it in.

        Args:
            queries: (B, n_heads, 1, D).
            fresh: keys and values of the newest tokens, (B, H, 1, D); None: *plain* has them already.
            plain: of these rows.
            tiles: uint32 (H, capacity, words) of each row; anything for a row without.
            spans: of each row, *grown* tokens ago.
            grown: what to add to every length.
            sinks: learned sink logits (n_heads,), or None.

        Returns:
            an array like *queries*, and the new *plain*, in which nothing is left or fresh any more.
        """
        ...

    def fold(self, plain: mx.array, leaving: tuple[Leaving, ...]) -> mx.array:
        """Return the tiles of tokens that leave *plain*, as many for each: uint32 (leaving, H, tiles, words)."""
        ...


class Stepping(Protocol):
    """What makes steppers on a device."""

    def room_for(self, rows: int) -> int | None:
        """Return for how many rows the kernel is that serves *rows*: it is proved for each. None: too many rows."""
        ...

    def stepper(
        self, case: Case, layout: TileLayout, keys: KeyTransform | None, scale: float
    ) -> Stepper | None:
        """Return what takes the steps of *case* in a layer whose packed keys went through *keys*; None: it cannot."""
        ...
