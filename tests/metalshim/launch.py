"""Run a compiled kernel over a grid: memory with guard pages around each buffer, errors as exceptions."""

from __future__ import annotations

import ctypes as c
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.metalshim import compiler
from tests.metalshim.compiler import ShimError

MAX_THREADS = 1024  # of a threadgroup
MAX_GROUP_MEMORY = 32_768  # bytes
ORDERS = ("forward", "reverse", "random")

_PAGE = 4096
_ARENA = 1 << 32
_POISON = 0xFF  # NaN in every float format


@dataclass
class Buffer:
    """One buffer argument: *memory* is read before the launch and, if *writable*, replaced after it.

    *alignment* is its address modulo 16.
    """

    name: str
    memory: bytes
    writable: bool = False
    initialized: bool = True
    alignment: int = 0


@dataclass(frozen=True)
class Launched:
    """What a launch cost, and the bytes of each output that nothing wrote (known in check mode only)."""

    simd_operations: int
    barriers: int
    group_memory: int
    unwritten: dict[str, int] = field(default_factory=dict)


class _Region(c.Structure):
    _fields_ = (
        ("base", c.c_void_p), ("bytes", c.c_size_t), ("name", c.c_char_p),
        ("writable", c.c_uint32), ("initialized", c.c_uint32), ("unwritten", c.c_size_t),
    )  # fmt: skip


class _Launch(c.Structure):
    _fields_ = (
        ("entry", c.c_void_p), ("args", c.c_void_p),
        ("grid", c.c_uint32 * 3), ("group", c.c_uint32 * 3), ("seed", c.c_uint64),
        ("order", c.c_int32), ("check", c.c_int32), ("poison", c.c_int32), ("flush", c.c_int32),
        ("group_memory", c.c_void_p), ("group_memory_bytes", c.c_size_t),
        ("arena", c.c_void_p), ("arena_bytes", c.c_size_t),
        ("regions", c.POINTER(_Region)), ("n_regions", c.c_uint32),
        ("error", c.c_char_p), ("error_bytes", c.c_size_t), ("error_pc", c.c_void_p),
        ("switches", c.c_uint64), ("barriers", c.c_uint64), ("simd_operations", c.c_uint64),
    )  # fmt: skip


def launch(
    kernel: Path,
    buffers: Sequence[Buffer],
    grid: Sequence[int],
    group: Sequence[int],
    *,
    check: bool,
    flush: bool = False,
    order: str = "forward",
    seed: int = 0,
    most_group_memory: int = MAX_GROUP_MEMORY,
) -> Launched:
    """Run *kernel*, a shared object, over *grid* threads in threadgroups of *group*; x, y, z. *flush*: denormal numbers are zero.

    Raises:
        ShimError: a race, an access out of bounds, a divergence, undefined behaviour, too large a threadgroup.
    """
    runtime, library = _runtime(), _library(str(kernel))
    group_memory = library.msl_group_memory_bytes()
    if math.prod(group) > MAX_THREADS:
        raise ShimError(f"threadgroup {tuple(group)} is larger than {MAX_THREADS} threads")
    if group_memory > most_group_memory:
        raise ShimError(f"threadgroup memory {group_memory} bytes > {most_group_memory}")

    regions = (_Region * len(buffers))()
    arguments = (c.c_void_p * len(buffers))()
    spans = []
    at = runtime.arena + _PAGE
    for i, buffer in enumerate(buffers):
        size = len(buffer.memory)
        pages = max(-(-(size + buffer.alignment) // _PAGE), 1) * _PAGE
        runtime.msl_commit(at, pages)
        # flush with the guard page that follows, as far as alignment allows
        base = at + pages - -(-(size + buffer.alignment) // 16) * 16 + buffer.alignment
        c.memset(at, _POISON, pages)
        if buffer.initialized:
            c.memmove(base, buffer.memory, size)
        regions[i] = _Region(
            base, size, buffer.name.encode(), buffer.writable, buffer.initialized, 0
        )
        arguments[i] = base
        spans.append((at, pages))
        at += pages + _PAGE

    error = c.create_string_buffer(4096)
    state = _Launch(
        entry=c.cast(library.msl_entry, c.c_void_p),
        args=c.cast(arguments, c.c_void_p),
        grid=(c.c_uint32 * 3)(*grid),
        group=(c.c_uint32 * 3)(*(min(a, b) for a, b in zip(group, grid, strict=True))),
        seed=seed,
        order=ORDERS.index(order),
        check=check,
        poison=_POISON,
        flush=flush,
        group_memory=library.msl_group_memory(),
        group_memory_bytes=group_memory,
        arena=runtime.arena,
        arena_bytes=_ARENA,
        regions=regions,
        n_regions=len(buffers),
        error=c.cast(error, c.c_char_p),
        error_bytes=len(error),
    )
    failed = runtime.msl_launch(c.byref(state))
    for buffer, region, span in zip(buffers, regions, spans, strict=True):
        if buffer.writable and not failed:
            buffer.memory = c.string_at(region.base, region.bytes)
        runtime.msl_release(*span)
    if failed:
        where = f" at {_line(kernel, state.error_pc)}" if state.error_pc else ""
        raise ShimError(error.value.decode() + where)
    unwritten = {b.name: r.unwritten for b, r in zip(buffers, regions, strict=True) if b.writable}
    return Launched(
        simd_operations=state.simd_operations,
        barriers=state.barriers,
        group_memory=group_memory,
        unwritten=unwritten if check else {},
    )


@cache
def _runtime() -> Any:
    library: Any = c.CDLL(str(compiler.runtime()), mode=c.RTLD_GLOBAL)
    library.msl_arena.restype = c.c_void_p
    library.msl_arena.argtypes = [c.c_size_t]
    library.msl_commit.argtypes = library.msl_release.argtypes = [c.c_void_p, c.c_size_t]
    library.arena = library.msl_arena(_ARENA)
    return library


@cache
def _library(path: str) -> Any:
    _runtime()  # whose symbols the kernel needs
    library: Any = c.CDLL(path)
    library.msl_group_memory.restype = c.c_void_p
    library.msl_group_memory_bytes.restype = c.c_size_t
    return library


def _line(kernel: Path, pc: int) -> str:
    """Return file and line of the kernel at *pc*, as far as addr2line knows."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    start = next((int(line.split("-")[0], 16) for line in maps if str(kernel) in line), None)
    if start is None:
        return "?"
    command = ["addr2line", "-e", str(kernel), "-i", hex(pc - start - 1)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return " <- ".join(Path(line).name for line in lines if "?" not in line)
