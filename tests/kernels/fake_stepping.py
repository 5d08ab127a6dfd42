"""Decode steps of several rows at once, by the reference row by row: what a device's kernel has to equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from daemon.kernels import encode, reference
from daemon.kernels.case import Case
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TileLayout
from daemon.kernels.stepping import Leaving, Span
from daemon.kernels.stored import RawSide, Stored


@dataclass
class FakeStepping:
    """Serves up to *most* rows; *spoil* changes what a step gives, *spoil_tiles* what a fold does. *calls* remembers the rows of each step."""

    most: int = 8
    spoil: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]] = lambda out, plain: (
        out,
        plain,
    )
    spoil_tiles: Callable[[mx.array], mx.array] = lambda tiles: tiles
    calls: list[int] = field(default_factory=list)
    folds: list[int] = field(default_factory=list)

    def room_for(self, rows: int) -> int | None:
        return next((room for room in (1, self.most) if rows <= room), None)

    def stepper(
        self, case: Case, layout: TileLayout, keys: KeyTransform | None, scale: float
    ) -> FakeStepper:
        return FakeStepper(self, layout, keys, scale)


@dataclass
class FakeStepper:
    stepping: FakeStepping
    layout: TileLayout
    keys: KeyTransform | None
    scale: float

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
        outs, following = [], []
        for index, span in enumerate(spans):
            length, in_head = span.length + grown, span.packed_from
            count = in_head + length - span.packed_to - (fresh is not None)
            sides = []
            for side in (0, 1):
                old = plain[index, side]
                parts = [old[:, :in_head], old[:, in_head + span.left : span.left + count]]
                if fresh is not None:
                    parts.append(fresh[side][index])
                sides.append(mx.concatenate(parts, axis=1))
            raw = [
                RawSide(side[:, :in_head] if in_head else None, side[:, in_head:]) for side in sides
            ]
            stored = Stored(
                layout=self.layout,
                length=length,
                packed_from=span.packed_from,
                packed_to=span.packed_to,
                tiles=tiles[index],
                k=raw[0],
                v=raw[1],
                n_kv_heads=plain.shape[2],
                dropped=span.dropped,
                keys=self.keys,
            )
            outs.append(reference.attend(queries[index], stored, self.scale, None, sinks))
            room = [(0, 0), (0, 0), (0, plain.shape[3] - sides[0].shape[1]), (0, 0)]
            following.append(mx.pad(mx.stack(sides), room, constant_values=mx.nan))
        self.stepping.calls.append(len(spans))
        return self.stepping.spoil(mx.stack(outs), mx.stack(following))

    def fold(self, plain: mx.array, leaving: tuple[Leaving, ...]) -> mx.array:
        made = []
        for each in leaving:
            k, v = plain[each.row][:, :, each.slot : each.slot + each.tokens]
            if self.keys is not None:
                k = self.keys.centered(k, each.position)
            made.append(encode.tiles(k, v, self.layout, first=each.first, old=None))
        self.stepping.folds.append(len(leaving))
        return self.stepping.spoil_tiles(mx.stack(made))
