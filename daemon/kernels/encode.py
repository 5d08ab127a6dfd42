"""The one entry to encoding: vectors in, tiles out, by the device's kernel where it has proved itself."""

from __future__ import annotations

from functools import cache, partial
from typing import Protocol, cast

import mlx.core as mx

from daemon.kernels import codec, cuda, metal, packing
from daemon.kernels.backend import Backend, Choice, backend_of_device, choose
from daemon.kernels.codec import Rounding
from daemon.kernels.cuda import rounding
from daemon.kernels.packing import TILE, Packed, TileLayout
from daemon.kernels.rotation import Side
from daemon.policy.schemes import INT8, Codec

_Coded = tuple[mx.array, mx.array]

# Share of codes that may differ: a sum in another order may move a coordinate over a threshold, or choose another of
# two stretches with all but the same angle. No error of a kernel leaves the others right.
_TOLERANCE = 0.02


class Encode(Protocol):
    """A way to encode, under the contract of tiles."""

    def __call__(
        self,
        k: mx.array | None,
        v: mx.array | None,
        layout: TileLayout,
        *,
        first: int,
        old: mx.array | None,
    ) -> mx.array:
        """Return the tiles that hold *k* and *v* from slot *first* on."""
        ...


def tiles(
    k: mx.array | None,
    v: mx.array | None,
    layout: TileLayout,
    *,
    first: int,
    old: mx.array | None,
) -> mx.array:
    """Return the tiles that hold *k* and *v* from slot *first* on.

    Args:
        k: keys (H, n, dim_k), any float dtype; None where keys are in full precision.
        v: values (H, n, dim_v), likewise.
        layout: of the tiles.
        first: slot of the first vector, counted from the beginning of the first tile.
        old: a tile (H, 1, words) whose tokens in the slots before *first* are kept; None: those slots are zero.

    Returns:
        uint32 (H, ⌈(first + n) / 32⌉, words); slots after the last vector are zero.
    """
    return _encoder(choice(layout).backend)(k, v, layout, first=first, old=old)


def choice(layout: TileLayout) -> Choice:
    """Return what encodes *layout* on MLX's default device, and why not its kernel."""
    return _choice(layout, backend_of_device())


def encoded(
    k: mx.array | None,
    v: mx.array | None,
    layout: TileLayout,
    *,
    first: int,
    old: mx.array | None,
    closest: Rounding = codec.closest,
) -> mx.array:
    """Encode in plain mx, which is what every kernel is compared with; the contract is that of tiles.

    *closest* chooses codes; a device may have a kernel for that alone.
    """
    kept = None if old is None else packing.unpack(old, layout)
    return packing.pack(
        Packed(
            k=_side(k, layout.k, "k", first, kept.k if kept else None, closest),
            v=_side(v, layout.v, "v", first, kept.v if kept else None, closest),
        ),
        layout,
    )


def _side(
    vectors: mx.array | None,
    kind: Codec,
    side: Side,
    first: int,
    old: _Coded | None,
    closest: Rounding,
) -> _Coded | None:
    if vectors is None:
        return None
    codes, scales = codec.encode(vectors, kind, side, closest)
    if old is not None:
        codes = mx.concatenate([old[0][:, :first], codes], axis=1)
        scales = mx.concatenate([old[1][:, :first], scales], axis=1)
        first = 0
    around = [(0, 0), (first, -(first + codes.shape[1]) % TILE)]
    return (
        mx.pad(codes, [*around, (0, 0)]),
        mx.pad(scales, around + [(0, 0)] * (scales.ndim - 2)),
    )


def _on_cuda(
    k: mx.array | None,
    v: mx.array | None,
    layout: TileLayout,
    *,
    first: int,
    old: mx.array | None,
) -> mx.array:
    """Encode whole tiles by CUDA's kernel, and what it does not make in plain mx with CUDA's rounding."""
    if k is None or v is None or old is not None or cuda.encoding_refusal(layout):
        return encoded(k, v, layout, first=first, old=old, closest=_cuda_rounding)
    return cuda.tiles(k, v, layout, first=first)


def _cuda_rounding(u: mx.array, bits: float) -> _Coded:
    return rounding.closest(u, bits, codec.STRETCHES)


def _encoder(backend: Backend) -> Encode:
    match backend:
        case "metal":
            return metal.tiles
        case "cuda":
            return _on_cuda
        case "cpu" | "reference" | "mlx":
            return encoded


@cache
def _choice(layout: TileLayout, backend: Backend) -> Choice:
    rules = {kind.rule for kind in (layout.k, layout.v)}
    if not rules <= {"unbiased", "absmax", "groups"}:
        return Choice("reference", "kernels know no other scales than unbiased ones")
    match backend:
        case "metal":
            problem = partial(_problem, metal.tiles, layout)
            return choose(backend, "encode", metal.encoding_refusal(layout), problem)
        case "cuda":
            problem = partial(_problem, _on_cuda, layout)
            return choose(backend, "encode", _cuda_refusal(layout), problem)
        case "cpu" | "reference" | "mlx":
            return Choice("reference")


def _rounded(kind: Codec) -> bool:
    """Return whether codes of *kind* are each the nearest to a coordinate in a codebook."""
    return kind.rotated and kind != INT8 and not kind.trellis


def _cuda_refusal(layout: TileLayout) -> str | None:
    """Return why no kernel of CUDA helps to encode *layout*; None: one does."""
    refusal = cuda.encoding_refusal(layout)
    if refusal and not any(_rounded(kind) for kind in (layout.k, layout.v)):
        return refusal
    return None


def _problem(encode: Encode, layout: TileLayout) -> str | None:
    """Return what is wrong with *encode*, as the end of a sentence that begins with it; None: nothing."""
    random = mx.random.split(mx.random.key(0))
    k, v = (
        mx.random.normal((2, TILE + 5, dim), key=key) if kind.scaled else None
        for kind, dim, key in zip(
            (layout.k, layout.v), (layout.dim_k, layout.dim_v), random, strict=True
        )
    )
    # into tiles of their own, and into one that holds tokens already
    for old in (None, encoded(k, v, layout, first=0, old=None)[:, :1]):
        expected = encoded(k, v, layout, first=3, old=old)
        if found := difference(encode(k, v, layout, first=3, old=old), expected, layout):
            return found
    return None


def difference(got: mx.array, expected: mx.array, layout: TileLayout) -> str | None:
    """Return how the tiles *got* are not those *expected*, as the end of a sentence that begins with kernels; None: they are."""
    ours, theirs = packing.unpack(got, layout), packing.unpack(expected, layout)
    for one, other in ((ours.k, theirs.k), (ours.v, theirs.v)):
        if one is None or other is None:
            continue
        if cast("float", mx.mean(one[0] != other[0]).item()) > _TOLERANCE:
            return "disagree with the reference about codes on this device"
        if not mx.allclose(one[1], other[1], rtol=2e-2, atol=0).item():
            return "disagree with the reference about scales on this device"
    return None
