"""Boundary layers: the first and the last attention layers, whose keys or values keep more bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from daemon.policy.architecture import Architecture
from daemon.policy.schemes import FP16, INT8, Codec, Scheme
from daemon.policy.spec import KvRequest


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Which layers keep keys and values in *codec*, by rank among the layers that may be quantized."""

    codec: Codec
    k_layers: frozenset[int]
    v_layers: frozenset[int]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: KvRequest, arch: Architecture, *, key_means: bool) -> Self:
        """Return the boundary layers that *request* means for a model whose *key_means* are known, or are not."""
        eligible = arch.eligible
        half = len(eligible) // 2
        needed = 0 if key_means else arch.boundary_k
        k_count = needed if request.boundary_k == "auto" else request.boundary_k
        asked = {"boundary_v": request.boundary_v}
        if request.boundary_k != "auto":
            asked["boundary_k"] = request.boundary_k
        return cls(
            codec=FP16 if request.boundary_mode == "fp16" else INT8,
            k_layers=ends(eligible, k_count),
            v_layers=ends(eligible, request.boundary_v),
            warnings=tuple(
                f"{key}: {count} layers at each end are more than half of {len(eligible)}; {half} used"
                for key, count in asked.items()
                if eligible and count > half
            ),
        )

    def raised(self, index: int, scheme: Scheme) -> tuple[Scheme, str | None]:
        """Return the scheme of layer *index* and what it has more of, such as "V int8".

        Nothing is ever lowered, and the whole schemes (fp16, int8, affine) stay as they are.
        """
        k = index in self.k_layers and self.codec.bits > scheme.k.bits
        v = index in self.v_layers and self.codec.bits > scheme.v.bits
        if scheme.name in ("fp16", "int8") or scheme.k.affine or not (k or v):
            return scheme, None
        after = Scheme(self.codec if k else scheme.k, self.codec if v else scheme.v)
        sides = " and ".join(side for side, more in (("K", k), ("V", v)) if more)
        return after, f"{sides} {self.codec.name}"


def ends(eligible: Sequence[int], count: int) -> frozenset[int]:
    """Return the first and the last *count* of *eligible*; never more than half at each end."""
    count = min(count, len(eligible) // 2)
    return frozenset((*eligible[:count], *eligible[len(eligible) - count :]))
