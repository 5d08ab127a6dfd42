"""Compile translated CUDA kernels with clang into shared objects, kept by the hash of everything they depend on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.metalshim.compiler import CHECKED, CPP, UNDEFINED, clang_path, hash_of, shared_object

INCLUDE = Path(__file__).parent / "cpp" / "include"

_FLAGS = (
    "-std=c++20", "-fPIC", "-g1", "-O1", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing",
    "-march=x86-64-v2", "-ffp-contract=off", "-fvisibility=hidden", "-ftrivial-auto-var-init=pattern",
    "-Wno-unknown-attributes", "-Wno-pragma-once-outside-header", "-Werror=return-type",
    "-I", str(INCLUDE), "-I", str(CPP),
)  # fmt: skip

# As the Metal shim's modes.
MODES: dict[str, tuple[str, ...]] = {
    "ub": (f"-fsanitize={UNDEFINED}",),
    "rough": ("-DCUDA_ROUGH", f"-fsanitize={UNDEFINED}"),
    "check": ("-DCUDA_ZONES", *CHECKED),
}


def compiled(source: str, mode: str) -> Path:
    """Return the shared object of the C++ text *source*.

    Raises:
        ShimError: it does not compile; the message is clang's.
    """
    name = hash_of(source, _surroundings(), *MODES[mode])
    return shared_object(source, name, (*_FLAGS, *MODES[mode]))


@cache
def _surroundings() -> str:
    headers = [path.read_text() for path in sorted(INCLUDE.iterdir())]
    return hash_of(*headers, (CPP / "abi.h").read_text(), clang_path(), *_FLAGS)
