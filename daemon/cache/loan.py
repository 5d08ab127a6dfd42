"""What rows that take decode steps together lend their tokens in full precision to."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from daemon.kernels.stored import RawSide


class Loan(Protocol):
    """What a row has lent its tokens in full precision to."""

    def length_of(self, index: int) -> int:
        """Return the tokens so far of the row at *index*."""
        ...

    def parts_of(self, index: int) -> tuple[RawSide, RawSide]:
        """Return what the row at *index* holds in full precision, keys and values."""
        ...

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that carries history of these rows, other than tiles."""
        ...

    @property
    def row_bytes(self) -> int:
        """How many bytes of them are one row's."""
        ...

    def end(self) -> None:
        """Take no more steps: a row goes on by itself, or with others."""
        ...
