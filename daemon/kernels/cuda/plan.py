"""What the CUDA kernels can do, which of the two does it, and in how many parts: decisions without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from daemon.kernels import order
from daemon.kernels.case import Case
from daemon.kernels.packing import TILE, TileLayout
from daemon.kernels.reference import FUSED_QUERIES
from daemon.policy.schemes import FP16

DIMS = (64, 80, 96, 128, 192, 256)
MOST_GROUPED = 16  # query heads of a KV head
MULTIPROCESSORS = 132  # of an H200; on another device blocks are merely spread less evenly

FAST_GROUPED = 8
ROOMS = (1, 8, 32, 64)  # rows that a variant of the fast kernel has inputs for
TILE_WARPS = 8
PLAIN_WARPS = 4
THREADS = 32 * (TILE_WARPS + PLAIN_WARPS)

_FEWEST_COUNTERS = 1024

SCAN_ROWS = 16
SCAN_THREADS = 256

_K_BITS = (8, 5, 4, 3.5, 3, 2)
_V_BITS = (8, 4, 3.5, 3, 2)
_DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def refusal(case: Case) -> str | None:
    """Return why no CUDA kernel does *case*, in words for the status; None: one does."""
    grouped, rest = divmod(case.n_heads, case.n_kv_heads)
    if unread(case):
        return unread(case)
    if rest or grouped > MOST_GROUPED:
        return f"the CUDA kernels serve up to {MOST_GROUPED} query heads a KV head, not {case.n_heads}/{case.n_kv_heads}"
    if case.queries > FUSED_QUERIES:
        return f"the CUDA kernels serve up to {FUSED_QUERIES} query tokens, not {case.queries}"
    return None


def unread(case: Case) -> str | None:
    """Return why the CUDA kernels do not read what *case* attends to; None: they do."""
    for side, codec, dim, widths in (
        ("keys", case.k, case.dim_k, _K_BITS),
        ("values", case.v, case.dim_v, _V_BITS),
    ):
        if codec != FP16 and (codec.affine or codec.bits not in widths):
            return f"the CUDA kernels do not read {codec.name} {side}"
        if dim not in DIMS:
            sizes = ", ".join(str(size) for size in DIMS)
            return (
                f"the CUDA kernels have no variant for {side} of {dim} values (there are {sizes})"
            )
    if case.dtype not in _DTYPES:
        return f"the CUDA kernels do not read {case.dtype} queries"
    return None


def is_fast(layout: TileLayout, grouped: int, queries: int, *, masked: bool) -> bool:
    """Return whether the tensor-core kernel does it, but for what depends on the key transform."""
    return (
        layout.order == order.FRAGMENTS
        and layout.dim_k == layout.dim_v
        and layout.dim_k in order.TENSOR_CORE_DIMS
        and grouped <= FAST_GROUPED
        and queries == 1
        and not masked
    )


def room_for(rows: int) -> int | None:
    """Return for how many rows the smallest variant of the tensor-core kernel is that serves *rows*; None: there is none."""
    return next((room for room in ROOMS if rows <= room), None)


def fast_splits(n_kv_heads: int, tiles: Sequence[int]) -> int:
    """Return into how many parts the *tiles* of each row's heads go.

    One block a multiprocessor, if all rows were equal; a row that is longer than the others is cut into more. A
    part has a tile or more for each warp.
    """
    most = max(tiles)
    even = MULTIPROCESSORS * most // (n_kv_heads * max(1, sum(tiles)))
    return max(1, min(even, MULTIPROCESSORS // n_kv_heads, -(-most // TILE_WARPS)))


def counters_for(heads: int) -> int:
    """Return how many counters a call gets for the *heads* of all its rows: one each, in few different sizes."""
    return max(_FEWEST_COUNTERS, 1 << (heads - 1).bit_length())


def scan_blocks(grouped: int, queries: int) -> int:
    """Return how many blocks share the query rows of a KV head in the general kernel."""
    return -(-grouped * queries // SCAN_ROWS)


def scan_splits(n_kv_heads: int, blocks: int, length: int) -> int:
    """Return into how many parts the tokens of a head go in the general kernel."""
    return max(1, min(MULTIPROCESSORS // (n_kv_heads * blocks), -(-length // TILE)))


def scan_shared_bytes(dim_k: int, dim_v: int, mean_width: int) -> int:
    """Return the shared memory of a block of the general kernel (scan.cuh)."""
    queries = SCAN_ROWS * (2 * dim_k + mean_width)
    return 4 * (queries + TILE * ((dim_k + mean_width) | 1) + TILE * dim_v)


@dataclass(frozen=True, slots=True)
class FastShape:
    """One variant of the tensor-core kernel, and the shared memory of a block of it (`Shape` in fragments.cuh)."""

    dim: int
    grouped: int
    k_bits: int
    v_bits: int
    rotary: bool

    @property
    def shared_bytes(self) -> int:
        """Bytes; the kernel's own count of them is checked against this when it is compiled."""
        tiles = -(-self.grouped // 4)
        heads = 4 * tiles
        stages = 2 if self.k_bits + self.v_bits > 12 else 3
        words = (self.k_bits + self.v_bits) * self.dim + TILE
        in_registers = tiles == 1 and self.k_bits != 5
        parts = TILE_WARPS + 1
        at = _aligned(TILE_WARPS * stages * 8)
        at = _aligned(at + heads * 2 * self.dim + heads * 8 + parts * heads * 8)
        at = _aligned(at + 4 * 32 * 16 + heads * 8)
        at = _aligned(at + heads * (self.dim + 8) * 4)
        at = _aligned(at + heads * 64 * 8 * self.rotary) + 64 * 8 * self.rotary
        at = _aligned(at + TILE_WARPS * 2 * tiles * 8 * 36 * 4 * self.rotary)
        at = _aligned(at + 4096 * (self.rotary and not in_registers))
        return at + TILE_WARPS * stages * words * 4


def _aligned(size: int) -> int:
    return -(-size // 128) * 128
