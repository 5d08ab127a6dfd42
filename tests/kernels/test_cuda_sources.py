"""The CUDA sources compile: nvcc turns what MLX would hand to its own compiler into PTX, where nvcc is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from daemon.kernels import order
from daemon.kernels.cuda import plan, sources
from daemon.policy.schemes import FP16, INT8, TRELLIS3, TURBO3, TURBO3_5, TURBO5, Codec

INPUT_TYPES = {
    "tiles": "unsigned int", "spans": "int", "layer": "float", "counters": "unsigned int",
    "rotated": "float", "k_levels": "float", "v_levels": "float", "mean": "float", "pairs": "int",
    "plain": "int", "table": "float", "mask": "float", "sums": "float", "folds": "int",
}  # fmt: skip

# What MLX puts in front of a kernel: shapes and strides of its inputs are arguments by value.
PREAMBLE = """
template <class T> struct Eight { T at[8]; __host__ __device__ const T& operator[](int i) const { return at[i]; } };
using Shape = Eight<int>;
using Strides = Eight<long long>;
"""


def kernel_text(
    name: str,
    text: tuple[str, str],
    inputs: Sequence[str],
    outputs: dict[str, str],
    types: dict[str, str],
    **template: int | str,
) -> str:
    """Write the kernel that MLX (0.32.4) would generate from a header and a body."""
    body = text[1]
    arguments = []
    for each in inputs:
        arguments.append(f"const {types.get(each, INPUT_TYPES.get(each, 'float'))}* {each}")
        for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if f"{each}_{suffix}" in body:
                arguments.append(f"const __grid_constant__ {kind} {each}_{suffix}")
    arguments += [f"{kind}* {each}" for each, kind in outputs.items()]
    constants = "".join(
        f"using {key} = {value};\n"
        if isinstance(value, str)
        else f"constexpr int {key} = {value};\n"
        for key, value in template.items()
    )
    return f'extern "C" __global__ void {name}({", ".join(arguments)}) {{\n{constants}{body}\n}}\n'


def fast_text(
    dim: int, grouped: int, k_bits: int, v_bits: int, rotary: bool, kind: str, rows: int
) -> str:
    shape = plan.FastShape(dim, grouped, k_bits, v_bits, rotary)
    vectors = dict.fromkeys(("q", "fresh_keys", "fresh_values", "plain", "logits"), kind)
    tiles = {f"tiles{row}": "unsigned int" for row in range(rows)}
    constants = {
        "DIM": dim, "GROUPED": grouped, "K_BITS": k_bits, "V_BITS": v_bits, "ROTARY": int(rotary),
        "HAS_MEAN": 1, "N_PAIRS": dim // 2 * rotary, "PAIR_STEP": 1, "PAIR_GAP": dim // 2, "SCALE": 1,
        "K_STEP": 1, "V_STEP": 1, "SHARED": shape.shared_bytes,
    }  # fmt: skip
    return kernel_text(
        f"fast_{dim}_{grouped}_{k_bits}_{v_bits}_{rotary:d}",
        sources.fast_text(constants, kind, rows, sinks=not rotary),
        sources.fast_inputs(rows, sinks=not rotary),
        {"out": kind, "next": kind, "sums": "float"},
        vectors | tiles,
    )


def scan_text(
    dims: tuple[int, int], kinds: tuple[Codec, Codec], tile_order: int, masked: bool
) -> str:
    k, v = kinds
    vectors = dict.fromkeys(("q", "k_head", "k_tail"), "__nv_bfloat16")
    vectors |= dict.fromkeys(("v_head", "v_tail"), "__half")
    return kernel_text(
        f"scan_{dims[0]}_{dims[1]}_{k.name}_{v.name}_{tile_order}".replace(".", "_"),
        sources.scan_text(masked=masked),
        [*sources.SCAN_INPUTS, *["mask"] * masked],
        {"sums": "float"},
        vectors,
        DIM_K=dims[0], DIM_V=dims[1], K_HALVES=int(2 * k.bits), K_TRELLIS=int(k.trellis),
        V_HALVES=int(2 * v.bits), V_TRELLIS=int(v.trellis), ORDER=tile_order, GROUPED=5,
        QUERIES=3, N_PAIRS=16, N_PLAIN=1, SCALE=1, SHARED=0, Q="__nv_bfloat16", K="__nv_bfloat16",
        V="__half",
    )  # fmt: skip


def turn_text(dim: int, kind: str, scaled: bool) -> str:
    return kernel_text(
        f"turn_{dim}_{scaled:d}", sources.turn_text(scaled=scaled), ["q", "basis", *["scales"] * scaled],
        {"out": "float"}, {"q": kind}, DIM_K=dim, GROUPED=4, QUERIES=2, Q=kind,
    )  # fmt: skip


def restore_text(dim: int, kind: Codec, tile_order: int, keys: bool, raw: str) -> str:
    return kernel_text(
        f"restore_{dim}_{kind.name}_{tile_order}_{keys:d}".replace(".", "_"), sources.restore_text(),
        sources.RESTORE_INPUTS, {"out": raw}, {"head": raw, "tail": raw, "channels": "int"},
        DIM=dim, HALVES=int(2 * kind.bits), IS_TRELLIS=int(kind.trellis), ORDER=tile_order,
        KEYS=int(keys), CODES_AT=64, SCALES_AT=128, SCALED=int(keys), HAS_MEAN=int(keys),
        N_PAIRS=16, WIDTH=33, X=raw, T=raw,
    )  # fmt: skip


def merge_text(dim: int, kind: str, turned: bool, sinks: bool) -> str:
    return kernel_text(
        f"merge_{dim}_{turned:d}_{sinks:d}", sources.merge_text(turned=turned, sinks=sinks),
        ["sums", "basis", *["logits"] * sinks], {"out": kind}, {"logits": "__half"},
        DIM_V=dim, HEADS=8, QUERIES=2, L="__half", T=kind,
    )  # fmt: skip


def round_text(dim: int, levels: int) -> str:
    return kernel_text(
        f"round_{dim}_{levels}", sources.round_text(), ["u", "numbers"],
        {"codes": "unsigned char", "overlap": "float"}, {}, DIM=dim, LEVELS=levels, STRETCHES=8,
    )  # fmt: skip


def encode_text(dim: int, k_bits: int, v_bits: int, kind: str) -> str:
    return kernel_text(
        f"encode_{dim}_{k_bits}_{v_bits}", sources.encode_text(), sources.ENCODE_INPUTS,
        {"out": "unsigned int"}, {"values": kind}, DIM=dim, K_BITS=k_bits, V_BITS=v_bits,
        K_LEVELS=2**k_bits, V_LEVELS=2**v_bits, STRETCHES=8, K="float", V=kind,
    )  # fmt: skip


def fold_text(dim: int, k_bits: int, v_bits: int, kind: str, step: int) -> str:
    constants = {
        "DIM": dim, "K_BITS": k_bits, "V_BITS": v_bits, "K_LEVELS": 2**k_bits, "V_LEVELS": 2**v_bits,
        "STRETCHES": 8, "HAS_MEAN": 1, "N_PAIRS": dim // 4, "PAIR_STEP": step,
        "PAIR_GAP": dim // 4 if step == 1 else 1,
    }  # fmt: skip
    return kernel_text(
        f"fold_{dim}_{k_bits}_{v_bits}", sources.fold_text(constants, kind), sources.FOLD_INPUTS,
        {"out": "unsigned int"}, {"plain": kind},
    )  # fmt: skip


VARIANTS = {
    "fast": (
        sources.fast_text({}, "float", 1, sinks=False)[0],
        [
            fast_text(128, 4, 4, 4, True, "__half", 1),
            fast_text(128, 5, 8, 3, False, "__nv_bfloat16", 8),
            fast_text(64, 8, 5, 2, True, "float", 64),
        ],
    ),
    "general": (
        sources.scan_text(masked=False)[0],
        [
            scan_text((192, 128), (TRELLIS3, FP16), order.CANONICAL, True),
            scan_text((80, 80), (TURBO5, TURBO3_5), order.CANONICAL, False),
            scan_text((64, 64), (INT8, TURBO3), order.FRAGMENTS, False),
            turn_text(80, "__nv_bfloat16", True),
            turn_text(128, "float", False),
            merge_text(192, "__half", True, False),
            merge_text(80, "__nv_bfloat16", False, True),
        ],
    ),
    "restoring": (
        sources.restore_text()[0],
        [
            restore_text(128, TURBO3, order.FRAGMENTS, True, "__half"),
            restore_text(80, TRELLIS3, order.CANONICAL, False, "__nv_bfloat16"),
            restore_text(256, TURBO3_5, order.CANONICAL, True, "float"),
        ],
    ),
    "encoding": (
        sources.encode_text()[0],
        [encode_text(128, 4, 3, "__half"), encode_text(64, 5, 8, "__nv_bfloat16")],
    ),
    "folding": (
        sources.fold_text({}, "float")[0],
        [fold_text(128, 4, 4, "__half", 1), fold_text(64, 8, 3, "__nv_bfloat16", 2)],
    ),
    "rounding": (sources.round_text()[0], [round_text(80, 16), round_text(128, 11)]),
}


def compiled(header: str, kernels: Sequence[str], folder: Path) -> str:
    """Return the PTX that nvcc makes of *kernels*; whatever it warns about is an error."""
    source, made = folder / "kernels.cu", folder / "kernels.ptx"
    source.write_text(PREAMBLE + header + "\n".join(kernels))
    command = [
        "nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=compute_90a", "-ptx",
        "-Werror", "all-warnings", "-diag-suppress", "177", "-o", str(made), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return made.read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", VARIANTS)
def test_nvcc_compiles_the_sources(name: str, tmp_path: Path) -> None:
    header, kernels = VARIANTS[name]
    assert compiled(header, kernels, tmp_path).count(".visible .entry") == len(kernels)
