"""The storage of one sequence in one layer: [sinks | packed tiles | tail].

Tokens arrive at the tail in full precision. Before the next ones arrive, all but the newest
*tail_tokens* move into tiles of 32, a fold of one or more tiles at a time, so a token is packed once
and its raw form is gone. Arrays are never written in place: an update makes a new array, which MLX
turns into a write to the old buffer when nobody else holds it. So a copy of a row shares everything
and costs nothing.

Rows that take decode steps together lend what they have in full precision (daemon.cache.joined), and take
it back as soon as anything else happens to them.

With a token budget, whole tiles leave from after the sinks (daemon.cache.window says which). What is
left keeps its order and its slots: to attention the row is a shorter sequence.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from daemon.cache import window
from daemon.cache.loan import Loan
from daemon.cache.row_state import expected_shapes, shapes_of
from daemon.cache.side import FullPrecision, RowState
from daemon.cache.tiles import put
from daemon.kernels import encode, order, packing
from daemon.kernels.attention import REFERENCE
from daemon.kernels.case import Attend
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE, TileLayout
from daemon.kernels.stored import Stored
from daemon.policy.matching import least_token_budget
from daemon.policy.schemes import FP16, Scheme

DECODE_TOKENS = 8  # up to this many tokens at once are decoded: one, or several with speculation


class Row:
    """One sequence of one layer; *length* tokens so far.

    Of these, *dropped* tokens after the sinks are gone, in whole tiles, where there is a
    *token_budget*: the most tokens that any token attends to. Tokens leave the tail *fold_tokens* at a
    time, a multiple of a tile. A prompt of up to *exact_prompt* tokens stays in full precision until it is
    decoded; more than that is packed while it is read. *place* is the layer's number. *keys* is what is taken off keys before they are packed, and
    *statistics_id* the name of the statistics behind it; affine keys are packed as they are. *attention*
    is what attends to it.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        sink_tokens: int,
        tail_tokens: int,
        fold_tokens: int = TILE,
        exact_prompt: int = 0,
        token_budget: int | None = None,
        keys: KeyTransform | None = None,
        statistics_id: str | None = None,
        attention: Attend = REFERENCE,
        place: int = 0,
    ) -> None:
        if exact_prompt and token_budget is not None:
            raise ValueError("a row with a token budget packs its prompt as it is read")
        if token_budget is not None and (
            token_budget % TILE
            or token_budget < least_token_budget(sink_tokens, tail_tokens, fold_tokens)
        ):
            raise ValueError(
                f"a token budget of {token_budget} is not a multiple of {TILE} with room for"
                f" {sink_tokens} sink tokens, a tail of {tail_tokens}, a fold of {fold_tokens} and a tile"
            )
        self.scheme = scheme
        self.keys = keys if scheme.k.rotated else None
        self.sink_tokens = sink_tokens
        self.tail_tokens = tail_tokens
        self.fold_tokens = fold_tokens
        self.exact_prompt = exact_prompt
        self.token_budget = token_budget
        self.statistics_id = statistics_id
        self.attention = attention
        self.place = place
        self.dropped = 0
        self._length = 0
        self._packed_to = 0
        self._layout: TileLayout | None = None
        self._tiles: mx.array | None = None
        self._k = FullPrecision(scheme.k, sink_tokens)
        self._v = FullPrecision(scheme.v, sink_tokens)
        self._loan: tuple[Loan, int] | None = None

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._length if self._loan is None else self._loan[0].length_of(self._loan[1])

    @property
    def layout(self) -> TileLayout | None:
        """The layout of its tiles; None before the first token."""
        return self._layout

    def fresh(self) -> Row:
        """Return an empty row with the same policy."""
        return Row(
            self.scheme,
            sink_tokens=self.sink_tokens,
            tail_tokens=self.tail_tokens,
            fold_tokens=self.fold_tokens,
            exact_prompt=self.exact_prompt,
            token_budget=self.token_budget,
            keys=self.keys,
            statistics_id=self.statistics_id,
            attention=self.attention,
            place=self.place,
        )

    def copy(self) -> Row:
        """Return a row that shares every array with this one; appending to either leaves the other alone."""
        other = self.fresh()
        other._length, other.dropped = self.length, self.dropped
        other._packed_to = self._packed_to
        other._layout, other._tiles = self._layout, self._tiles
        k, v = self._sides()
        other._k, other._v = k.copy(), v.copy()
        return other

    def lend(self, loan: Loan, index: int) -> None:
        """Let *loan* have the tokens in full precision, as its row *index*, and count on from there."""
        if self._loan is not None:
            self._loan[0].end()
        self._loan = loan, index
        self._k, self._v = self._k.holding(None, None), self._v.holding(None, None)

    @property
    def loan(self) -> tuple[Loan, int] | None:
        """What the tokens in full precision are lent to, and which row this is of it."""
        return self._loan

    def _take_back(self) -> None:
        if self._loan is not None:
            self._k, self._v = self._sides()
            self._length = self.length
            self._loan[0].end()
            self._loan = None

    def _sides(self) -> tuple[FullPrecision, FullPrecision]:
        """Return keys and values in full precision as they are now."""
        if self._loan is None:
            return self._k, self._v
        k, v = self._loan[0].parts_of(self._loan[1])
        return self._k.holding(k.head, k.tail), self._v.holding(v.head, v.tail)

    def __deepcopy__(self, memo: dict[int, object]) -> Row:
        return self.copy()

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the tokens of *keys* (H, n, dim_k) and *values* (H, n, dim_v); older ones are packed first."""
        self._take_back()
        if self._layout is None:
            self._layout = packing.native_layout(
                self.scheme.k, self.scheme.v, keys.shape[-1], values.shape[-1]
            )
        if not self._reads_prompt(keys.shape[1]):
            self.pack()
            self._drop()
        self._k.append(keys)
        self._v.append(values)
        self._length += keys.shape[1]

    def pack(self) -> None:
        """Move all tokens but the tail into tiles; append does it before it adds."""
        if self.due_tokens:
            self._take_back()
        self._pack_up_to(self._packable())

    @property
    def joinable(self) -> bool:
        """Whether it may take decode steps together with others: whole tiles leave its tail, and stay."""
        return (
            self._layout is not None
            and self.tail_tokens > 0
            and self.token_budget is None
            and self._packed_to % TILE == 0
        )

    @property
    def tiles(self) -> mx.array | None:
        """Its packed tokens, (H, capacity, words); None: there are none."""
        return self._tiles if self._packed_to else None

    @property
    def full_precision(self) -> int:
        """How many of its tokens are in full precision."""
        return self._kept - max(0, self._packed_to - self.sink_tokens)

    @property
    def packed(self) -> tuple[int, int]:
        """The kept tokens from and up to which tokens are in tiles."""
        some = self._packed_to > self.sink_tokens
        return (self.sink_tokens, self._packed_to) if some else (0, 0)

    @property
    def folds_at(self) -> int:
        """How many tokens it has when the next one to come makes tokens leave the tail, of which there is one."""
        first = max(self._packed_to, self.sink_tokens)
        return self.tail_tokens + (first // self.fold_tokens + 1) * self.fold_tokens

    def take_tiles(self, tiles: mx.array, end: int) -> None:
        """Put the *tiles* of the tokens up to *end*, which left the tail from a tile's beginning on, behind the others."""
        self._tiles = put(self._tiles, tiles, self._packed_to // TILE, self.place)
        self._packed_to = end

    def trim(self, count: int) -> int:
        """Forget the newest *count* tokens, or all there are; return how many that was.

        Raises:
            ValueError: the next token would attend to tokens that the budget has dropped.
        """
        self.check_trim(count)
        self._take_back()
        count = min(count, self._length)
        self._length -= count
        self._packed_to = min(self._packed_to, self._kept)
        for side in (self._k, self._v):
            side.keep(
                self._kept, packed=self._packed_to if self._packed_to > self.sink_tokens else 0
            )
        if self._packed_to <= self.sink_tokens:
            self._packed_to = 0
        return count

    def check_trim(self, count: int) -> None:
        """Raise ValueError if `trim(count)` would; a batch asks every row before it trims any."""
        left = max(0, self.length - count)
        if self.token_budget and self.dropped > window.dropped_at(left, self.token_budget):
            raise ValueError(
                f"cannot trim {count} of {self.length} tokens: the next one would attend to tokens that a"
                f" token budget of {self.token_budget} has dropped"
            )

    def stored(self) -> Stored:
        """Return what attention reads."""
        if self._layout is None:
            raise ValueError("an empty row has nothing to attend to")
        packed_from, packed_to = self.packed
        k, v = self._sides()
        return Stored(
            layout=self._layout,
            length=self._kept,
            packed_from=packed_from,
            packed_to=packed_to,
            tiles=self._tiles,
            k=k.raw(),
            v=v.raw(),
            n_kv_heads=self._k.n_heads,
            dropped=self.dropped,
            keys=self.keys,
        )

    def mask(self, queries: int, mask: mx.array | None) -> mx.array | None:
        """Return *mask*, over all tokens so far, as the newest *queries* need it for what is stored; None: causal."""
        if self.token_budget is None:
            return mask
        kept = window.Kept(self.length, self.sink_tokens, self.dropped, self.token_budget)
        return kept.mask(queries, mask)

    def export(self) -> RowState:
        """Return everything the row holds, for Row.restored."""
        (n_heads, dim_k), (_, dim_v) = self.shapes()
        k, v = self._sides()
        tiles = {}
        if self._tiles is not None and self._packed_to and self._layout is not None:
            used = self._tiles[:, : -(-self._packed_to // TILE)]
            tiles["tiles"] = packing.reordered(used, self._layout, order.CANONICAL)
        return RowState(
            length=self.length,
            dropped=self.dropped,
            packed_to=self._packed_to,
            n_kv_heads=n_heads,
            dim_k=dim_k,
            dim_v=dim_v,
            dtype_k=self._k.dtype,
            dtype_v=self._v.dtype,
            arrays={**tiles, **k.export("k"), **v.export("v")},
        )

    def restored(self, state: RowState) -> Row:
        """Return a row with this one's policy that holds *state*; it goes on exactly as the exported one would.

        Raises:
            ValueError: *state* is none that a row with this policy could have.
        """
        if shapes_of(state.arrays) != expected_shapes(state, self.scheme, self.sink_tokens):
            raise ValueError(
                "its arrays are not those of a row with this policy and that many tokens"
            )
        row = self.fresh()
        row._length, row.dropped, row._packed_to = state.length, state.dropped, state.packed_to
        if state.length:
            row._layout = packing.native_layout(
                self.scheme.k, self.scheme.v, state.dim_k, state.dim_v
            )
            tiles = state.arrays.get("tiles")
            if tiles is not None:
                canonical = replace(row._layout, order=order.CANONICAL)
                tiles = packing.reordered(tiles, canonical, row._layout.order)
            row._tiles = tiles
            row._k.restore("k", state, state.dim_k, state.dtype_k)
            row._v.restore("v", state, state.dim_v, state.dtype_v)
        return row

    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (n_kv_heads, dim) of keys and of values; zeros while the row is empty."""
        return (self._k.n_heads, self._k.dim), (self._v.n_heads, self._v.dim)

    @property
    def dtype(self) -> str:
        """The dtype of keys in full precision, by name: MLX's own objects cannot be deep-copied."""
        return self._k.dtype

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtypes of keys and of values in full precision, by name."""
        return self._k.dtype, self._v.dtype

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that carries history."""
        tiles = [] if self._tiles is None else [self._tiles]
        lent = [] if self._loan is None else self._loan[0].arrays
        return [*tiles, *lent, *self._k.arrays(), *self._v.arrays()]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare capacity included."""
        tiles = 0 if self._tiles is None else self._tiles.nbytes
        if self._loan is not None:
            return tiles + self._loan[0].row_bytes
        return tiles + sum(array.nbytes for array in (*self._k.arrays(), *self._v.arrays()))

    @property
    def used_bytes(self) -> int:
        """Bytes that hold tokens, spare capacity not counted."""
        tiles = 0
        if self._tiles is not None:
            tiles = self._tiles.nbytes // self._tiles.shape[1] * -(-self._packed_to // TILE)
        raw = [
            part
            for side in self._sides()
            for part in (side.raw().head, side.raw().tail)
            if part is not None
        ]
        return tiles + sum(part.nbytes for part in raw)

    @property
    def packed_tokens(self) -> int:
        """The position up to which tokens are in tiles; all of them where nothing is packed at all."""
        if self._layout is not None and not self._layout.packed:
            return self.length
        return self._packed_to + (self.dropped if self._packed_to else 0)

    @property
    def packs(self) -> bool:
        """Whether tokens are packed at all: not where keys and values both stay in full precision."""
        return not (self.scheme.k is FP16 and self.scheme.v is FP16)

    @property
    def due_tokens(self) -> int:
        """Tokens that `pack` would move now."""
        if self._layout is None or not self._layout.packed:
            return 0
        return max(0, self._packable() - max(self._packed_to, self.sink_tokens))

    def _reads_prompt(self, count: int) -> bool:
        """Whether *count* new tokens belong to a prompt that is still short enough to stay in full precision."""
        unpacked = self._kept - self._packed_to
        return count > DECODE_TOKENS and unpacked + count <= self.exact_prompt

    @property
    def _kept(self) -> int:
        return self.length - self.dropped

    def _packable(self) -> int:
        """Return the kept token up to which tokens leave the tail: whole folds, unless there is no tail at all."""
        if self.tail_tokens == 0:
            return self._kept
        folded = (self.length - self.tail_tokens) // self.fold_tokens * self.fold_tokens
        return folded - self.dropped

    def _drop(self) -> None:
        """Forget the oldest tokens after the sinks that the next token does not attend to."""
        if self.token_budget is None:
            return
        count = window.dropped_at(self.length, self.token_budget) - self.dropped
        if count <= 0:
            return
        if self._tiles is not None and self._packed_to:
            self._tiles = self._tiles[:, count // TILE :]
            self._packed_to -= count
        for side in (self._k, self._v):
            side.drop(count)
        self.dropped += count

    def _pack_up_to(self, end: int) -> None:
        layout = self._layout
        start = max(self._packed_to, self.sink_tokens)
        if layout is None or not layout.packed or end <= start:
            return
        first_tile = self._packed_to // TILE
        kept = self._packed_to - first_tile * TILE  # tokens of a tile that is not full yet
        unused = self.sink_tokens if self._packed_to == 0 else 0  # slots that belong to sinks
        old = None
        if kept:
            assert self._tiles is not None
            old = self._tiles[:, first_tile : first_tile + 1]
        tiles = encode.tiles(
            self._leaving(self._k, start, end),
            self._leaving(self._v, start, end),
            layout,
            first=kept or unused,
            old=old,
        )
        self._tiles = put(self._tiles, tiles, first_tile, self.place)
        self._packed_to = end

    def _leaving(self, side: FullPrecision, start: int, end: int) -> mx.array | None:
        """Take the oldest tail tokens of *side*, those at *start* to *end*, as they are to be packed."""
        if side.codec is FP16:
            return None
        vectors = side.take(end - start)
        if side is self._k and self.keys is not None:
            vectors = self.keys.centered(vectors, start + self.dropped)
        return vectors
