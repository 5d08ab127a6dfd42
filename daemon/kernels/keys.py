"""What is taken off keys before they are packed, and given back exactly in the scores.

A key at position p is stored as z = (k - RoPE_p(μ)) / s: μ is the mean of the keys before rotary
embedding, s a factor per channel, both per KV head and from a model's calibration profile. The score
of a query is then ⟨s∘q, z⟩ + q·RoPE_p(μ). The second term is exact, costs no bits, and needs no memory
per token: with pairs (a, b) of channels that rotate by an angle θ_p,

    q·RoPE_p(μ) = Σ_pairs (q_a·μ_a + q_b·μ_b)·cos θ_p + (q_b·μ_a - q_a·μ_b)·sin θ_p,

a product of a few coefficients per query with a table of cosines and sines that all layers share.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

_TABLE_STEP = 1024  # positions by which a table grows
# BLAS packs and divides a large product; few rows go through a table faster in products too small for that
_BLOCK = 256  # positions, a divisor of _TABLE_STEP
_FEW_ROWS = 16
_PROBES = (1, 977)  # positions at which the shape of a rotary embedding is looked at
_FAR = 2**20  # a position past the context that any embedding was trained for

Rope = Callable[..., mx.array]


class RotaryError(ValueError):
    """A rotary embedding does something else than rotating pairs of channels."""


class Rotary:
    """A layer's rotary embedding, taken apart into pairs of channels and angles.

    Works for any module that rotates disjoint pairs by angles that depend on the position only:
    traditional or half-split, partial, and the scaled variants, whose factors become part of the table.

    Raises:
        RotaryError: *rope* is not such a module.
    """

    def __init__(self, rope: Rope, dim: int) -> None:
        self._rope = rope
        self._dim = dim
        matrices = [self._matrix(position) for position in (0, *_PROBES)]
        mixed = np.maximum(np.abs(matrices[1]), np.abs(matrices[2]))
        np.fill_diagonal(mixed, 0.0)
        partner = [np.flatnonzero(row) for row in mixed]
        self.first = [a for a, to in enumerate(partner) if len(to) == 1 and a < to[0]]
        self.second = [int(partner[a][0]) for a in self.first]
        self.plain = [a for a, to in enumerate(partner) if len(to) == 0]
        self._table: mx.array | None = None
        self._turns: mx.array | None = None
        self._columns: mx.array | None = None
        self.signature = b"".join(matrix.astype(np.float32).tobytes() for matrix in matrices[1:])
        self._check(matrices[1:])

    def shift(self, mean: mx.array, start: int, count: int) -> mx.array:
        """Return RoPE_p(mean) for *count* positions from *start* on: (H, count, dim)."""
        repeated = mx.broadcast_to(mean[None, :, None], (1, mean.shape[0], count, self._dim))
        return self._rope(mx.contiguous(repeated), offset=start)[0]

    def coefficients(self, queries: mx.array, mean: mx.array) -> mx.array:
        """Return what multiplies `table`: queries (H, N, dim) and mean (H, dim) give (H, N, table width)."""
        first, second = mx.array(self.first), mx.array(self.second)
        qa, qb = queries[..., first], queries[..., second]
        ma, mb = mean[:, None, first], mean[:, None, second]
        parts = [qa * ma + qb * mb, qb * ma - qa * mb]
        if self.plain:
            plain = mx.array(self.plain)
            parts.append(mx.sum(queries[..., plain] * mean[:, None, plain], axis=-1, keepdims=True))
        return mx.concatenate(parts, axis=-1)

    def table(self, start: int, end: int) -> mx.array:
        """Return cosines, sines and a column of ones for unrotated channels: (end - start, width), float32."""
        return self.whole_table(end)[start:end]

    def whole_table(self, end: int) -> mx.array:
        """Return the table from position 0 to *end* or further."""
        if self._table is None or end > self._table.shape[0]:
            self._table = self._rows(-(-end // _TABLE_STEP) * _TABLE_STEP)
        return self._table

    def products(self, coefficients: mx.array, start: int, end: int) -> mx.array:
        """Return the products of *coefficients* (N, width) with the rows of the table from *start* to *end*: (N, end - start)."""
        if len(coefficients) > _FEW_ROWS:
            return coefficients @ self.table(start, end).T
        first = start // _BLOCK
        blocks = self._blocks(end)[first : -(-end // _BLOCK)]
        products = mx.contiguous((coefficients @ blocks).swapaxes(0, 1))
        joined = products.reshape(len(coefficients), -1)
        return joined[:, start - first * _BLOCK : end - first * _BLOCK]

    def _blocks(self, end: int) -> mx.array:
        """Return the whole table in blocks of positions, transposed: (blocks, width, positions)."""
        table = self.whole_table(end)
        if self._columns is None or self._columns.shape[0] * _BLOCK != table.shape[0]:
            blocks = table.reshape(-1, _BLOCK, table.shape[1])
            self._columns = mx.contiguous(blocks.swapaxes(1, 2))
            mx.eval(self._columns)
        return self._columns

    def turns(self, count: int) -> mx.array:
        """Return what 0 to *count* positions add to the angles: (count, dim), cosines of all pairs, then sines.

        Pairs that do not rotate have zeros. table[p + i] is table[p] turned by turns[i], for every p.
        """
        if self._turns is None or self._turns.shape[0] != count:
            pairs, half = len(self.first), self._dim // 2
            rows = self.table(0, count)
            size = rows[
                0, :pairs
            ]  # of the embedding's own factor, which table has and a turn has not
            around = [(0, 0), (0, half - pairs)]
            parts = [mx.pad(rows[:, at : at + pairs] / size, around) for at in (0, pairs)]
            self._turns = mx.concatenate(parts, axis=-1)
            mx.eval(self._turns)
        return self._turns

    def _rows(self, count: int) -> mx.array:
        # RoPE_p of a vector with ones at the first channel of each pair is cos θ_p there and sin θ_p at its partner
        ones = np.zeros(self._dim, dtype=np.float32)
        ones[self.first] = 1.0
        turned = self.shift(mx.array(ones)[None], 0, count)[0]
        parts = [turned[:, mx.array(self.first)], turned[:, mx.array(self.second)]]
        if self.plain:
            parts.append(mx.ones((count, 1)))
        table = mx.concatenate(parts, axis=-1)
        mx.eval(table)
        return table

    def _matrix(self, position: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """Return RoPE at *position* as a matrix whose row j is the image of the j-th unit vector."""
        eye = mx.eye(self._dim)[None, :, None]
        return np.array(self._rope(eye, offset=position)[0, :, 0].astype(mx.float32))

    def _check(self, matrices: list[np.ndarray[tuple[int, int], np.dtype[np.float32]]]) -> None:
        if 2 * len(self.first) + len(self.plain) != self._dim or not self.first:
            raise RotaryError("it does not rotate disjoint pairs of channels")
        for matrix in matrices:
            a, b = self.first, self.second
            turns = np.allclose(matrix[a, a], matrix[b, b], atol=1e-5) and np.allclose(
                matrix[a, b], -matrix[b, a], atol=1e-5
            )
            if not turns or not np.allclose(matrix[self.plain, self.plain], 1.0, atol=1e-5):
                raise RotaryError("it does more than rotating pairs of channels")
        angles = [np.arctan2(matrix[a, b], matrix[a, a]) for matrix in matrices]
        ahead = angles[0] * (_PROBES[1] / _PROBES[0]) - angles[1]
        if not np.allclose(np.cos(ahead), 1.0, atol=1e-3):
            raise RotaryError("its angles do not grow with the position")
        ones = mx.ones((1, 1, 66, self._dim))
        second, first = self._rope(ones, offset=_FAR), self._rope(ones[:, :, :2], offset=_FAR + 1)
        if not mx.allclose(second[:, :, 1], first[:, :, 0], atol=1e-3).item():
            raise RotaryError("its angles depend on the tokens that come along")


class KeyTransform:
    """The mean and the scale of one layer's keys, (H, dim) float32 each, and how the mean rotates.

    *mean* may be None: nothing is subtracted. *rotary* None: the layer has no rotary embedding, and
    the mean is the same at every position.
    """

    def __init__(self, scale: mx.array, mean: mx.array | None, rotary: Rotary | None) -> None:
        self.scale = scale
        self.mean = mean
        self.rotary = rotary
        self._coefficients: mx.array | None = None

    def centered(self, keys: mx.array, start: int) -> mx.array:
        """Return (k - RoPE_p(μ)) / s of *keys* (H, n, dim) at the positions from *start* on, float32."""
        keys = keys.astype(mx.float32)
        shift = self._shift(start, keys.shape[1])
        return (keys if shift is None else keys - shift) / self.scale[:, None]

    def restored(self, centered: mx.array, start: int) -> mx.array:
        """Return s·z + RoPE_p(μ): the inverse of centered."""
        keys = centered * self.scale[:, None]
        shift = self._shift(start, keys.shape[1])
        return keys if shift is None else keys + shift

    def scaled(self, queries: mx.array) -> mx.array:
        """Return s∘q for queries (H, N, dim)."""
        return queries * self.scale[:, None]

    def bias(self, queries: mx.array, start: int, end: int) -> mx.array | None:
        """Return q·RoPE_p(μ) for queries (H, N, dim) and the positions from *start* to *end*: (H, N, end - start)."""
        if self.mean is None:
            return None
        if self.rotary is None:
            return mx.sum(queries * self.mean[:, None], axis=-1, keepdims=True)
        if (
            self._coefficients is None
        ):  # they are linear in the queries: one product instead of a dozen operations
            heads, dim = self.mean.shape
            each = mx.broadcast_to(mx.eye(dim), (heads, dim, dim))
            self._coefficients = self.rotary.coefficients(each, self.mean)
            mx.eval(self._coefficients)
        coefficients = queries @ self._coefficients
        heads, count, width = coefficients.shape
        # all heads have one table, so theirs is one product
        bias = self.rotary.products(coefficients.reshape(heads * count, width), start, end)
        return bias.reshape(heads, count, end - start)

    def partners(self, dim: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Return of each of *dim* channels its pair or -1, the one that it rotates with, and whether it is the second of the two."""
        rows = np.zeros((dim, 3), dtype=np.int32)
        rows[:, 0] = -1
        if self.rotary is not None:
            for pair, (a, b) in enumerate(zip(self.rotary.first, self.rotary.second, strict=True)):
                rows[a], rows[b] = (pair, b, 0), (pair, a, 1)
        return rows

    def _shift(self, start: int, count: int) -> mx.array | None:
        if self.mean is None:
            return None
        if self.rotary is None:
            return self.mean[:, None]
        return self.rotary.shift(self.mean, start, count).astype(mx.float32)
