"""One sequence at a time through mlx-lm's BatchGenerator, for models whose modules cannot bear more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self


class AloneRow:
    """A batch of one row that is the cache itself: what BatchGenerator asks of a batch, and no more rows."""

    def merge(self, caches: Sequence[Self]) -> Self:
        """Return the one cache in *caches*.

        Raises:
            ValueError: there are several.
        """
        if len(caches) != 1:
            raise ValueError("this model runs one sequence at a time")
        return caches[0]

    def filter(self, keep: list[int]) -> None:
        """Keep the row; without it BatchGenerator drops the cache itself."""

    def extend(self, other: Self) -> None:
        """Refuse a second row; raises ValueError."""
        raise ValueError("this model runs one sequence at a time")

    def extract(self, index: int) -> Self:
        """Return the row, which is this cache."""
        return self

    def prepare(self, **_: object) -> None:
        """Do nothing: one row is never padded."""

    def finalize(self) -> None:
        """Do nothing: one row is never padded."""


def alone(made: Any) -> Any:
    """Return the cache *made*, now an AloneRow too; it keeps its class as a base."""
    kind: type = type(made)
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"Alone{kind.__name__}", (AloneRow, kind), {})
    made.__class__ = _CLASSES[kind]
    return made


def plain_class(made: Any) -> type:
    """Return the class that the cache *made* has apart from being an AloneRow."""
    kind: type = type(made)
    return kind.__bases__[1] if issubclass(kind, AloneRow) else kind


def like(other: Any, made: Any) -> Any:
    """Return the cache *made*, an AloneRow if the cache *other* is one."""
    return alone(made) if isinstance(other, AloneRow) else made


_CLASSES: dict[type, type] = {}  # one for each class of cache, made when first met
