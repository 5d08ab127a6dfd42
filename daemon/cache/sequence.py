"""The two caches that mlx-lm drives: one sequence, and a batch of sequences of any lengths.

Both follow mlx-lm 0.32.2's cache protocol by duck typing. They hand out opaque views instead of
arrays; the seam (daemon.cache.seam) turns an attention call on a view into `attend`. A batch is a
list of rows: nothing is padded to the longest, and merge, filter, extend and extract move rows. Where the
device can, rows take decode steps together (daemon.cache.joined); else, and for everything else, they go
one by one.

Never give these classes an attribute `bits` (mlx-lm would take its own quantized path), `__len__` or
`__bool__` (an empty cache would count as no cache and lose its mask).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, Self

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from daemon.cache.joined import Joined, join
from daemon.cache.row import Row
from daemon.kernels.backend import computed
from daemon.kernels.case import Attend
from daemon.kernels.rotation import Side

Mask = mx.array | str | None

_LEAST_OFFSETS = 16


class Attending(Protocol):
    """What can hand out views: attention on a view comes back to it."""

    def shape_of(self, side: Side) -> tuple[int, ...]:
        """Return (batch, n_kv_heads, tokens, dim) of the keys or the values."""
        ...

    def dtype_of(self, side: Side) -> mx.Dtype:
        """Return the dtype that the model computed."""
        ...

    def attend(
        self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array:
        """Attend from *queries* (B, n_heads, L, dim_k); returns (B, n_heads, L, dim_v)."""
        ...


class View:
    """A stand-in for the keys or the values of a cache: it has a shape and a dtype, and no numbers.

    A model that computes on it instead of passing it to attention fails loudly.
    """

    __slots__ = ("cache", "side")

    def __init__(self, cache: Attending, side: Side) -> None:
        self.cache = cache
        self.side = side

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, n_kv_heads, tokens, dim); as many tokens as the mask for the last update is wide."""
        return self.cache.shape_of(self.side)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype that the model computed."""
        return self.cache.dtype_of(self.side)

    def __iter__(self) -> Any:
        raise TypeError("this cache's keys and values are packed; they can only be attended to")


class _Cache:
    """What both caches share; *rows* is the only state."""

    rows: list[Row]
    _attention: Attend | None = None  # of latents; else each row has its own
    _joined: Joined | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        other = copy.copy(self)
        other.rows, other._joined = copy.deepcopy(self.rows, memo), None
        return other

    def keys_and_values(self: Attending) -> tuple[View, View]:
        """Return views of everything stored, for layers that read another layer's cache."""
        return View(self, "k"), View(self, "v")

    def shape_of(self, side: Side) -> tuple[int, ...]:
        """Return (batch, n_kv_heads, tokens, dim) of the keys or the values."""
        n_heads, dim = max(row.shapes()[0 if side == "k" else 1] for row in self.rows)
        return len(self.rows), n_heads, self.width, dim

    def dtype_of(self, side: Side) -> mx.Dtype:
        """Return the dtype that the model computed."""
        dtype: mx.Dtype = getattr(mx, self.rows[0].dtype)
        return dtype

    @property
    def width(self) -> int:
        """Tokens that a view shows: all that are stored."""
        return self.size()

    @property
    def state(self) -> list[mx.array]:
        """Every array that carries history: mlx-lm evaluates them after each prefill chunk."""
        return self.arrays

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that carries history."""
        return [array for row in self.rows for array in row.arrays]

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    def empty(self) -> bool:
        """Return whether no token is stored."""
        return all(row.length == 0 for row in self.rows)

    def size(self) -> int:
        """Return the tokens of the longest row."""
        joined = self._going
        return joined.longest if joined else max((row.length for row in self.rows), default=0)

    def is_trimmable(self) -> bool:
        """Return whether the newest tokens can be forgotten: always, until a token budget has dropped old ones."""
        return not any(row.dropped for row in self.rows)

    def trim(self, count: int) -> int:
        """Forget the newest *count* tokens of each row; return how many that was.

        Raises:
            ValueError: a row cannot (Row.trim); then no row has changed.
        """
        joined = self._going
        if joined is not None and joined.trim(count):
            return count
        for row in self.rows:
            row.check_trim(count)
        return max((row.trim(count) for row in self.rows), default=0)

    @property
    def due_tokens(self) -> int:
        """Tokens that `pack` would move now."""
        joined = self._going
        if joined is not None and not joined.due:
            return 0
        return sum(row.due_tokens for row in self.rows)

    def pack(self) -> None:
        """Move all tokens but the tails into tiles; an update does it before it adds."""
        joined = self._going
        if joined is None:
            for row in self.rows:
                row.pack()
        elif joined.due:
            joined.fold(self.rows)

    @property
    def _going(self) -> Joined | None:
        """The rows joined for decode steps, if nothing has happened to any of them since."""
        return self._joined if self._joined is not None and self._joined.going else None

    def _append_joined(self, keys: mx.array, values: mx.array) -> bool:
        """Add a token to each row at once, if they are joined; return whether they were."""
        joined = self._going
        if joined is None or keys.shape[2] != 1 or joined.waiting:
            return False
        joined.append(self.rows, keys, values)
        return True

    def _attend_joined(
        self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        """Attend from the newest token of each row at once, if the device can; joins the rows if they are not."""
        if queries.shape[2] != 1 or isinstance(mask, mx.array) or self._attention is not None:
            return None
        joined = self._going
        if joined is None or not joined.serves(queries, scale, sinks):
            joined = self._joined = join(self.rows, queries, scale, sinks)
        return None if joined is None else joined.attend(queries, sinks)

    def _attend_row(
        self,
        row: Row,
        queries: mx.array,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        attention = self._attention or row.attention
        return attention.attend(queries, row.stored(), scale, mask, sinks)


class SequenceCache(_Cache):
    """The cache of one sequence in one layer."""

    def __init__(self, row: Row) -> None:
        self.rows = [row]

    @property
    def row(self) -> Row:
        """The storage."""
        return self.rows[0]

    @property
    def offset(self) -> int:
        """Tokens stored, which is the position of the next one."""
        return self.row.length

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        """Store *keys* (1, H, n, dim_k) and *values*; return views of everything stored."""
        if not self._append_joined(keys, values):
            self.row.append(keys[0], values[0])
        return self.keys_and_values()

    def attend(
        self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array:
        """Attend from *queries* (1, n_heads, L, dim_k); returns (1, n_heads, L, dim_v)."""
        together = self._attend_joined(queries, scale, mask, sinks)
        if together is not None:
            return together
        array = mask if isinstance(mask, mx.array) else None
        if array is not None and array.ndim == 4:
            array = array[0]
        array = self.row.mask(queries.shape[2], array)
        return self._attend_row(self.row, queries[0], scale, array, sinks)[None]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask for *n* new tokens, as base.create_attention_mask asks for it."""
        if window_size is not None and self.offset + n > window_size:
            return causal(n, self.offset, window_size=window_size)
        if return_array:
            return causal(n, self.offset)
        return None if n == 1 else "causal"

    @staticmethod
    def merge(caches: Sequence[SequenceCache]) -> BatchCache:
        """Return a batch of the sequences in *caches*, empty ones included."""
        return BatchCache([cache.row for cache in caches])


class BatchCache(_Cache):
    """The caches of several sequences in one layer, each of its own length.

    To the model they look like one rectangle: histories end where the new tokens begin, and shorter
    ones are padded on the left; new tokens that are padding stand on the right. Masks have that shape.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._remaining: list[int] | None = None  # tokens still to come in a right-padded prefill
        self._valid: list[int] = []  # tokens of the last update that were no padding
        self._width: int | None = None  # of the rectangle of the last update

    @property
    def offset(self) -> mx.array:
        """Tokens stored in each row, int32 (B,): the positions of the next ones."""
        joined = self._going
        lengths = joined.lengths if joined else (tuple(row.length for row in self.rows), 0)
        return _offsets(*lengths)[...]  # an object of the caller's own, who may add to it in place

    @property
    def width(self) -> int:
        """Tokens that a view shows: the longest history and all new tokens, padding included."""
        return self.size() if self._width is None else self._width

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        """Store *keys* (B, H, n, dim_k) and *values*, padding excepted; return views of everything stored."""
        self._append(keys, values)
        return self.keys_and_values()

    def _append(self, keys: mx.array, values: mx.array) -> None:
        n = keys.shape[2]
        if self._remaining is None and self._append_joined(keys, values):
            self._width, self._valid = None, []
            return
        self._width = self.size() + n
        self._valid = [n] * len(self.rows)
        if self._remaining is not None:
            self._valid = [min(n, left) for left in self._remaining]
            self._remaining = [
                left - valid for left, valid in zip(self._remaining, self._valid, strict=True)
            ]
        for row, k, v, valid in zip(self.rows, keys, values, self._valid, strict=True):
            if valid:
                row.append(k[:, :valid], v[:, :valid])

    def attend(
        self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array:
        """Attend from *queries* (B, n_heads, L, dim_k); padding queries get zeros. Returns (B, n_heads, L, dim_v)."""
        if self._remaining is None:
            together = self._attend_joined(queries, scale, mask, sinks)
            if together is not None:
                return together
        length = queries.shape[2]
        valid = self._valid if len(self._valid) == len(self.rows) else [length] * len(self.rows)
        outs: list[mx.array | None] = []
        for index, (row, count) in enumerate(zip(self.rows, valid, strict=True)):
            count = min(count, length)
            if count == 0:
                outs.append(None)
                continue
            visible = row.mask(count, self._row_mask(mask, index, count))
            part = self._attend_row(row, queries[index, :, :count], scale, visible, sinks)
            outs.append(
                part if count == length else mx.pad(part, [(0, 0), (0, length - count), (0, 0)])
            )
        shape = next(out.shape for out in outs if out is not None)
        return mx.stack(
            [mx.zeros(shape, dtype=queries.dtype) if out is None else out for out in outs]
        )

    def _row_mask(self, mask: Mask, index: int, count: int) -> mx.array | None:
        """Cut one row out of a rectangular mask: left-padded history, then the chunk with its padding on the right."""
        if not isinstance(mask, mx.array):
            return None
        chunk, total = mask.shape[-2:]
        row = mask[index if mask.shape[0] > 1 else 0] if mask.ndim == 4 else mask
        end = total - chunk + count
        return row[..., :count, end - self.rows[index].length : end]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask for *n* new tokens a row; each row is causal by itself, so mostly none is needed."""
        if n == 1 and not return_array and window_size is None:
            return None
        longest = self.size()
        if return_array or (window_size is not None and longest + n > window_size):
            padding = mx.array([longest - row.length for row in self.rows])
            return causal(n, longest, window_size=window_size, left_padding=padding)
        return None if n == 1 else "causal"

    def prepare(
        self, *, lengths: list[int] | None = None, right_padding: list[int] | None = None
    ) -> None:
        """Announce a prefill whose rows have *lengths* tokens each, padded on the right to the longest."""
        if right_padding is not None and lengths is not None:
            self._remaining = list(lengths)

    def finalize(self) -> None:
        """End a padded prefill; padding was never stored, so nothing moves."""
        self._remaining = None

    def filter(self, keep: list[int]) -> None:
        """Keep only the rows at the indices *keep*, in that order."""
        self._change([self.rows[index] for index in keep])

    def extend(self, other: BatchCache) -> None:
        """Add the rows of *other* after these."""
        self._change([*self.rows, *other.rows])

    def extract(self, index: int) -> SequenceCache:
        """Return a copy of row *index* as a cache of its own."""
        return SequenceCache(self.rows[index].copy())

    def trim(self, count: int) -> int:
        """Forget the newest *count* tokens of each row; return how many that was."""
        trimmed = super().trim(count)
        self._width = None
        return trimmed

    def _change(self, rows: list[Row]) -> None:
        self.rows, self._joined, self._valid, self._width = rows, None, [], None


@lru_cache(maxsize=64)
def _offsets(lengths: tuple[int, ...], grown: int) -> mx.array:
    """Return *lengths*, each *grown* by some, int32: made once for all layers of a step.

    It is part of a longer array: on CUDA, what has up to 8 bytes is in memory that a GPU reads over PCIe, in every layer.
    """
    numbers = [length + grown for length in lengths]
    padded = mx.array(numbers + [0] * max(0, _LEAST_OFFSETS - len(numbers)), dtype=mx.int32)
    return computed(padded)[: len(numbers)]


def causal(n: int, offset: int, **options: Any) -> mx.array:
    """Return mlx-lm's boolean mask for *n* new tokens after *offset* ones."""
    mask: mx.array = create_causal_mask(n, offset, **options)
    return mask
