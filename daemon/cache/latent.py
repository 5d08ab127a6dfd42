"""The caches of layers with latent attention (MLA): one compressed vector and one rotary key a token.

mlx-lm's modules hand the two to the cache as keys and values, and want back the rotary keys as plain
arrays always. One new token attends to the latents themselves, which may stay packed behind a view;
several multiply them by a weight first, so they get plain vectors. In a `Row` the latents are the
keys, packed; the rotary keys are the values, in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from daemon.cache.sequence import BatchCache, Mask, SequenceCache, View, causal
from daemon.kernels import latent
from daemon.kernels.stored import Stored


class LatentCache(SequenceCache):
    """The cache of one sequence in one latent layer."""

    _attention = latent

    def update_and_fetch(  # type: ignore[override] # the rotary keys, and latents for several tokens, are arrays
        self, keys: mx.array, values: mx.array
    ) -> tuple[View | mx.array, mx.array]:
        """Store latents *keys* (1, 1, n, dim) and rotary keys *values*; return all that are stored.

        The latents are a view when n is 1, else an array.
        """
        self.row.append(keys[0], values[0])
        rotary = self.row.stored().v.joined()[None]
        if keys.shape[2] == 1:
            return View(self, "k"), rotary
        return latent.dense(self.row.stored(), keys.dtype)[None], rotary

    @staticmethod
    def merge(caches: Sequence[SequenceCache]) -> BatchLatentCache:
        """Return a batch of the sequences in *caches*, empty ones included."""
        return BatchLatentCache([cache.row for cache in caches])


class BatchLatentCache(BatchCache):
    """The caches of several sequences in one latent layer, each of its own length."""

    _attention = latent

    def update_and_fetch(  # type: ignore[override] # as LatentCache's
        self, keys: mx.array, values: mx.array
    ) -> tuple[View | mx.array, mx.array]:
        """Store latents *keys* (B, 1, n, dim) and rotary keys *values*, padding excepted; return all, as a rectangle.

        The latents are a view when n is 1, else an array; rows with a shorter history begin with zeros.
        """
        self._append(keys, values)
        rotary = self._rectangle(lambda stored: stored.v.joined(), values)
        if keys.shape[2] == 1:
            return View(self, "k"), rotary
        return self._rectangle(lambda stored: latent.dense(stored, keys.dtype), keys), rotary

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask for *n* new tokens a row: an array, because rows are padded to a rectangle."""
        longest = self.size()
        padding = mx.array([longest - row.length for row in self.rows])
        return causal(n, longest, window_size=window_size, left_padding=padding)

    def extract(self, index: int) -> LatentCache:
        """Return a copy of row *index* as a cache of its own."""
        return LatentCache(self.rows[index].copy())

    def _rectangle(self, plain: Callable[[Stored], mx.array], new: mx.array) -> mx.array:
        """Return the *plain* history (1, length, dim) of each row, padded on the left, and then *new* (B, 1, n, dim)."""
        longest = self.width - new.shape[2]
        rows = []
        for row, valid, chunk in zip(self.rows, self._valid, new, strict=True):
            before = row.length - valid
            history = plain(row.stored())[:, :before] if before else chunk[:, :0]
            missing = [(0, 0), (longest - before, 0), (0, 0)]
            rows.append(mx.pad(mx.concatenate([history, chunk], axis=1), missing))
        return mx.stack(rows)
