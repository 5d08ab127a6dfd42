"""The keys, or the values, of one sequence that are in full precision: sinks and tail, or all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from daemon.kernels.packing import TILE
from daemon.kernels.stored import RawSide
from daemon.policy.schemes import FP16, Codec

RAW_STEP = 256  # tokens by which a side in full precision grows: mlx-lm's own step


def dtype_name(array: mx.array) -> str:
    """Return the name of *array*'s dtype: MLX's own object cannot be deep-copied."""
    return str(array.dtype).rsplit(".", 1)[-1]


def written(buffer: mx.array, part: mx.array, at: int) -> mx.array:
    """Return *buffer* (H, n, …) with *part* from token *at* on; in place where nobody else holds the buffer."""
    out = buffer[...]  # an object of its own: writing to it leaves *buffer* as it is
    out[:, at : at + part.shape[1]] = part
    return out


def copied(x: mx.array, start: int, end: int) -> mx.array:
    """Return the tokens *start* to *end* of *x* (H, n, …) in memory of their own: a slice would keep all of *x* alive."""
    return mx.take(x, mx.arange(start, end), axis=1)


@dataclass(frozen=True, slots=True)
class RowState:
    """What a row holds, apart from its policy.

    *arrays* by name, without spare capacity: `tiles`, and `k_head`, `k_tail`, `v_head`, `v_tail` in full
    precision; a part that is empty is missing. *packed_to* counts kept tokens, as attention does.
    """

    length: int
    dropped: int
    packed_to: int
    n_kv_heads: int
    dim_k: int
    dim_v: int
    dtype_k: str
    dtype_v: str
    arrays: dict[str, mx.array]


class FullPrecision:
    """The keys, or the values, of a row that are in full precision."""

    def __init__(self, kind: Codec, sink_tokens: int) -> None:
        self.codec = kind
        self.n_heads = 0
        self.dim = 0
        self.dtype = "float16"
        self._sink_tokens = sink_tokens
        self._head: mx.array | None = None  # fp16: a buffer with spare room; else the sinks
        self._head_count = 0
        self._tail: mx.array | None = None  # a buffer with spare room at its end
        self._tail_from = 0
        self._tail_count = 0

    def copy(self) -> FullPrecision:
        """Return a side that shares every array with this one."""
        other = FullPrecision(self.codec, self._sink_tokens)
        other.n_heads, other.dim, other.dtype = self.n_heads, self.dim, self.dtype
        other._head, other._head_count = self._head, self._head_count
        other._tail, other._tail_from, other._tail_count = (
            self._tail,
            self._tail_from,
            self._tail_count,
        )
        return other

    def holding(self, head: mx.array | None, tail: mx.array | None) -> FullPrecision:
        """Return a side like this one that holds *head* and *tail* instead, neither of them empty."""
        other = self.copy()
        other._head = head
        other._head_count = 0 if head is None else head.shape[1]
        other._set_tail(tail)
        return other

    def append(self, x: mx.array) -> None:
        """Add the tokens of *x* (H, n, dim): to the buffer, or to the sinks and the tail."""
        self.n_heads, self.dim = x.shape[0], x.shape[2]
        self.dtype = dtype_name(x)
        if self.codec is FP16:
            self._append_to_buffer(x)
            return
        missing = self._sink_tokens - self._head_count
        if missing > 0:
            sinks = copied(x, 0, missing) if x.shape[1] > missing else x
            x = x[:, missing:]
            self._head = (
                sinks if self._head is None else mx.concatenate([self._head, sinks], axis=1)
            )
            self._head_count = self._head.shape[1]
        if x.shape[1]:
            self._append_to_tail(x)

    def take(self, count: int) -> mx.array:
        """Remove and return the oldest *count* tail tokens."""
        tail, rest = self._tail_in_use(), self._tail_count - count
        assert tail is not None
        if rest == 0:
            self._set_tail(None)
        elif count > rest:  # of a prompt: what is left is little
            self._set_tail(copied(tail, count, count + rest))
        else:
            self._tail_from, self._tail_count = self._tail_from + count, rest
        return tail[:, :count]

    def keep(self, length: int, *, packed: int) -> None:
        """Forget everything from token *length* on; the tail begins at *packed*, or after the sinks."""
        if self.codec is FP16:
            self._head_count = min(self._head_count, length)
            return
        in_tail = length - max(packed, self._sink_tokens)
        self._tail_count = max(0, min(self._tail_count, in_tail))
        if self._head is not None and length < self._head_count:
            self._head = self._head[:, :length] if length else None
            self._head_count = length

    def drop(self, count: int) -> None:
        """Forget the oldest *count* tokens after the sinks; where the side is packed, they are in tiles."""
        if self.codec is not FP16:
            return
        assert self._head is not None
        first, end = self._sink_tokens, self._head_count
        self._head = mx.concatenate(
            [self._head[:, :first], self._head[:, first + count : end]], axis=1
        )
        self._head_count = end - count

    def export(self, name: str) -> dict[str, mx.array]:
        """Return the arrays in use under the names of RowState, which begin with *name*."""
        raw = self.raw()
        parts = {f"{name}_head": raw.head, f"{name}_tail": raw.tail}
        return {part: array for part, array in parts.items() if array is not None}

    def restore(self, name: str, state: RowState, dim: int, dtype: str) -> None:
        """Take over the arrays that export gave, of vectors of *dim* values."""
        self.n_heads, self.dim, self.dtype = state.n_kv_heads, dim, dtype
        self._head = state.arrays.get(f"{name}_head")
        self._head_count = 0 if self._head is None else self._head.shape[1]
        self._set_tail(state.arrays.get(f"{name}_tail"))

    def raw(self) -> RawSide:
        """Return what attention reads."""
        head = self._head
        if head is not None and head.shape[1] != self._head_count:
            head = head[:, : self._head_count]
        return RawSide(head=head if self._head_count else None, tail=self._tail_in_use())

    def arrays(self) -> Iterator[mx.array]:
        """Yield every array that holds tokens."""
        for array in (self._head, self._tail if self._tail_count else None):
            if array is not None:
                yield array

    def _set_tail(self, tail: mx.array | None) -> None:
        self._tail, self._tail_from = tail, 0
        self._tail_count = 0 if tail is None else tail.shape[1]

    def _tail_in_use(self) -> mx.array | None:
        if self._tail is None or not self._tail_count:
            return None
        if self._tail_count == self._tail.shape[1]:
            return self._tail
        return self._tail[:, self._tail_from : self._tail_from + self._tail_count]

    def _append_to_tail(self, x: mx.array) -> None:
        end, added = self._tail_from + self._tail_count, x.shape[1]
        buffer = self._tail
        if buffer is not None and end + added <= buffer.shape[1] and buffer.dtype == x.dtype:
            self._tail = written(buffer, x, end)
            self._tail_count += added
            return
        old, count = self._tail_in_use(), self._tail_count + added
        parts = [x] if old is None else [old, x]
        if (
            added < TILE
        ):  # as tokens are decoded, not each with a new array; a prompt is packed before long
            parts.append(mx.zeros((x.shape[0], TILE, x.shape[2]), dtype=x.dtype))
        self._set_tail(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1))
        self._tail_count = count

    def _append_to_buffer(self, x: mx.array) -> None:
        end = self._head_count + x.shape[1]
        if self._head is None or end > self._head.shape[1]:
            room = -(-end // RAW_STEP) * RAW_STEP
            grown = mx.zeros((x.shape[0], room, x.shape[2]), dtype=x.dtype)
            if self._head is not None:
                old = self._head[:, : self._head_count]
                grown = written(grown, old, 0)
            self._head = grown
        self._head = written(self._head, x, self._head_count)
        self._head_count = end
