"""What one sequence of one layer holds, as attention sees it: sinks, packed tiles, tail."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE, TileLayout
from daemon.kernels.rotation import Side


@dataclass(frozen=True, slots=True)
class RawSide:
    """The keys, or the values, that are kept in full precision.

    *head* holds the sink tokens and *tail* the newest ones, each (H, n, D) or None when empty. A side
    whose codec is fp16 holds every token in *head*.
    """

    head: mx.array | None
    tail: mx.array | None

    def joined(self) -> mx.array:
        """Return head and tail as one array."""
        parts = [part for part in (self.head, self.tail) if part is not None]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


@dataclass(frozen=True, slots=True)
class Stored:
    """Tokens 0 to *length* of one sequence, in order; those from *packed_from* to *packed_to* are in *tiles*.

    *tiles* is uint32 (H, capacity, words); token p is in tile p // 32, and slots below *packed_from* are unused.
    Where a token budget has taken tokens out after the sinks, the tokens after them have closed up: from
    the sinks on, token p was computed at position p + *dropped*.
    """

    layout: TileLayout
    length: int
    packed_from: int
    packed_to: int
    tiles: mx.array | None
    k: RawSide
    v: RawSide
    n_kv_heads: int
    dropped: int = 0
    keys: KeyTransform | None = None
    """What was taken off packed keys; keys in full precision are as the model computed them."""

    def raw(self, side: Side) -> RawSide:
        """Return what of the keys, or of the values, is in full precision."""
        return self.k if side == "k" else self.v

    @property
    def packed_positions(self) -> tuple[int, int]:
        """The positions at which the first packed token was computed, and the one after the last."""
        return self.packed_from + self.dropped, self.packed_to + self.dropped

    def tiles_in_use(self) -> mx.array:
        """Return the tiles that hold tokens, without spare capacity."""
        assert self.tiles is not None
        return self.tiles[:, : -(-self.packed_to // TILE)]
