"""Compile translated kernels with clang into shared objects, kept by the hash of everything they depend on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from daemon import paths

CPP = Path(__file__).parent / "cpp"
INCLUDE = CPP / "include"
_CLANGS = tuple(f"clang++-{version}" for version in (19, 18, 17, 16, 20, 21))


class ShimError(RuntimeError):
    """A kernel does not compile, or does something that its machine does not allow."""


def missing() -> str | None:
    """Return why kernels cannot be run here, or None."""
    if os.uname().machine != "x86_64" or os.uname().sysname != "Linux":
        return "metalshim runs on Linux on x86-64"
    if clang() is None:
        return "metalshim needs clang 16 or newer: apt-get install clang-19"
    return None


@cache
def clang() -> str | None:
    """Return the path of clang++, or None."""
    return next((path for name in _CLANGS if (path := shutil.which(name))), None)


_FLAGS = (
    "-std=c++17", "-fPIC", "-g1", "-O1", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing",
    "-march=x86-64-v2", "-ffp-contract=off",
    "-Xclang", "-ffloat16-excess-precision=none",  # else half expressions are computed in float
    "-Xclang", "-cl-single-precision-constant",  # MSL has no double: 1.0 is a float
    "-Wno-unknown-attributes", "-Wno-duplicate-decl-specifier", "-Wno-ignored-attributes",
    "-Wno-pragma-once-outside-header",
)  # fmt: skip
UNDEFINED = "bounds,shift,integer-divide-by-zero,float-cast-overflow,alignment"
_TSAN = (
    "instrument-func-entry-exit=0",
    "instrument-memintrinsics=1",
    "instrument-read-before-write=1",
)
CHECKED = (
    f"-fsanitize=thread,{UNDEFINED}",
    *(part for option in _TSAN for part in ("-mllvm", f"-tsan-{option}")),
)

# ub: undefined behaviour and guard pages. rough: the last bits are another machine's. check: every access to memory,
# several times as slow.
MODES: dict[str, tuple[str, ...]] = {
    "ub": ("-ftrivial-auto-var-init=pattern", f"-fsanitize={UNDEFINED}"),
    "rough": ("-DMSL_ROUGH", "-ftrivial-auto-var-init=pattern", f"-fsanitize={UNDEFINED}"),
    "check": ("-DMSL_ZONES", "-ftrivial-auto-var-init=pattern", *CHECKED),
}  # fmt: skip


def compiled(source: str, mode: str) -> Path:
    """Return the shared object of the C++ text *source*.

    Raises:
        ShimError: it does not compile; the message is clang's.
    """
    header = _precompiled_header(mode)
    flags = (*_FLAGS, *MODES[mode], "-include-pch", f"{header}.pch", *_includes())
    return shared_object(source, hash_of(source, str(header)), flags)


def shared_object(source: str, name: str, flags: Sequence[str]) -> Path:
    """Return the shared object *name* of the C++ text *source*; what is there is not made again.

    Raises:
        ShimError: it does not compile.
    """
    made = folder() / f"{name}.so"
    if made.exists():
        return made
    text, part = made.with_suffix(".cpp"), made.with_suffix(f".{os.getpid()}")
    text.write_text(source)
    run_clang(*flags, "-shared", str(text), "-o", str(part))
    part.replace(made)
    return made


def runtime() -> Path:
    """Return the shared object of runtime.cpp."""
    source = CPP / "runtime.cpp"
    made = folder() / f"runtime-{hash_of(source.read_text(), (CPP / 'abi.h').read_text())}.so"
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        run_clang("-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-fcf-protection=none", str(source), "-o", str(part))  # fmt: skip
        part.replace(made)
    return made


_FAR_CAST = re.compile(r"\(\s*(?:const\s+)?\w[\w<>, ]*\s*\*+\s*\)")


@cache
def lint(source: str) -> tuple[str, ...]:
    """Return what is wrong with the address spaces in the C++ text *source*, one line each."""
    body = source.split("#line 200000")[0]
    command = [
        clang_path(), "-std=c++14", "-Werror=c++17-extensions",  # Metal's language is a C++14
        "-fsyntax-only", "-Wno-unknown-attributes", "-Wno-duplicate-decl-specifier",
        "-Xclang", "-cl-single-precision-constant", "-include", str(CPP / "lint.h"), "-x", "c++", "-",
    ]  # fmt: skip
    done = subprocess.run(command, input=body, capture_output=True, text=True)
    casts = [
        f"cast without an address space: {cast}"
        for cast in _FAR_CAST.findall(body)
        if not re.search(r"\b(device|constant|threadgroup|thread)\b", cast)
    ]
    return (*(line for line in done.stderr.splitlines() if " error: " in line), *casts)


def _precompiled_header(mode: str) -> Path:
    """Return MLX's own header, precompiled next to it; it names the files it was made of, so each checkout has its own."""
    parts = [path.read_text() for path in sorted(INCLUDE.rglob("*")) if path.is_file()]
    parts += [
        (CPP / "abi.h").read_text(),
        str(clang_path()),
        str(_FLAGS),
        str(MODES[mode]),
        *map(str, (INCLUDE, folder(), mlx())),
        importlib.metadata.version("mlx"),
    ]
    header = folder() / f"metal-{mode}-{hash_of(*parts)}.h"
    if not Path(f"{header}.pch").exists():
        header.write_text(
            '#include "mlx/backend/metal/kernels/utils.h"\n'
        )  # as every kernel of MLX begins
        part = f"{header}.{os.getpid()}"
        no_dates = (
            "-Xclang",
            "-fno-pch-timestamp",
        )  # files that a checkout writes again are the same
        run_clang("-x", "c++-header", *_FLAGS, *MODES[mode], *no_dates, *_includes(), str(header), "-o", part)  # fmt: skip
        Path(part).replace(f"{header}.pch")
    return header


def _includes() -> tuple[str, ...]:
    return "-I", str(INCLUDE), "-I", str(mlx())


@cache
def mlx() -> Path:
    """Return MLX's own kernel headers: the wheel ships them."""
    spec = importlib.util.find_spec("mlx.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "include"


@cache
def folder() -> Path:
    """Return the folder of compiled kernels."""
    made = paths.cache_dir() / "metalshim"
    made.mkdir(parents=True, exist_ok=True)
    return made


def hash_of(*texts: str) -> str:
    """Return a name for what *texts* make."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def clang_path() -> str:
    path = clang()
    if path is None:
        raise ShimError(str(missing()))
    return path


def run_clang(*arguments: str) -> None:
    """Run clang++. Raises ShimError with its message."""
    done = subprocess.run([clang_path(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ShimError(f"compile failed: {done.stderr[:6000]}")
