"""Decode steps of all rows of a layer in one node, and their folds in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx

from daemon.kernels import codec
from daemon.kernels.case import Case
from daemon.kernels.cuda import encoding, launch, plan, sources
from daemon.kernels.cuda.layer import Layer, layer_of
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TILE, TileLayout
from daemon.kernels.stepping import Leaving, Span

_FOLD_THREADS = 256


def stepper(
    case: Case, layout: TileLayout, keys: KeyTransform | None, scale: float
) -> CudaStepper | None:
    """Return what takes the steps of *case*, by the tensor-core kernel; None: it cannot."""
    grouped = case.n_heads // case.n_kv_heads
    if not plan.is_fast(layout, grouped, case.queries, masked=case.mask != "none"):
        return None
    layer = layer_of(layout, case.n_kv_heads, keys)
    return None if layer is None else CudaStepper(layer, scale)


@dataclass(frozen=True, slots=True)
class CudaStepper:
    """Decode steps of one layer; the contract is that of daemon.kernels.stepping.Stepper."""

    layer: Layer
    scale: float
    folding: dict[mx.Dtype, Any] = field(default_factory=dict)

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
        """Attend from each row's newest token and take it in, in one node."""
        words, splits = _placed(spans, grown, fresh is not None, self.layer.n_kv_heads)
        return launch.fast(
            queries, fresh, plain, tiles, words, self.layer, self.scale, splits, sinks=sinks
        )

    def fold(self, plain: mx.array, leaving: tuple[Leaving, ...]) -> mx.array:
        """Return the tiles of tokens that leave *plain*, in one node."""
        layer, layout, dim = self.layer, self.layer.layout, self.layer.layout.dim_k
        tiles = leaving[0].n_tiles
        (out,) = self._folding(plain.dtype)(
            inputs=[
                plain, launch.words_of(leaving), layer.constants,
                encoding.numbers(layout.k, dim), encoding.numbers(layout.v, dim),
            ],
            grid=(tiles * _FOLD_THREADS, layer.n_kv_heads, len(leaving)),
            threadgroup=(_FOLD_THREADS, 1, 1),
            output_shapes=[(len(leaving), layer.n_kv_heads, tiles, layout.words)],
            output_dtypes=[mx.uint32],
        )  # fmt: skip
        folded: mx.array = out
        return folded

    def _folding(self, dtype: mx.Dtype) -> Any:
        """Return the kernel of `fold`; made when first asked for."""
        if dtype not in self.folding:
            layer, layout = self.layer, self.layer.layout
            constants = {
                "DIM": layout.dim_k, "K_BITS": int(layout.k.bits), "V_BITS": int(layout.v.bits),
                "K_LEVELS": encoding.levels(layout.k), "V_LEVELS": encoding.levels(layout.v),
                "STRETCHES": len(codec.STRETCHES), "HAS_MEAN": int(layer.has_mean),
                "N_PAIRS": layer.n_pairs, "PAIR_STEP": layer.step, "PAIR_GAP": layer.gap,
            }  # fmt: skip
            self.folding[dtype] = sources.fold_kernel(constants, dtype)
        return self.folding[dtype]


@lru_cache(maxsize=256)
def _placed(
    spans: tuple[Span, ...], grown: int, fresh: bool, n_kv_heads: int
) -> tuple[mx.array, int]:
    """Return *spans* as words, and into how many parts their tiles go: the same for all layers of a step, mostly."""
    tiles = [-(-span.packed_to // TILE) - span.packed_from // TILE for span in spans]
    return launch.spans_of(spans, grown, fresh=fresh), plan.fast_splits(n_kv_heads, tiles)
