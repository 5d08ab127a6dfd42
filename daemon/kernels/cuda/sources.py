"""The CUDA sources, and the bodies of the kernels that MLX compiles around them.

MLX writes a kernel's signature from its inputs and outputs, and compiles the rest at first use, once for
each set of template arguments and process. Lengths, positions and strides are arguments:
nothing is compiled again because a sequence has grown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from daemon.kernels.cuda import plan

FOLDER = Path(__file__).parent

_FAST_FILES = ("common", "hopper", "decode", "mean", "head", "plain", "fragments")
_SCAN_FILES = ("common", "codes", "scan")

# What a block of the fast kernel has is its own: without bounds the compiler would spare registers for more threads.
_BOUNDS = f"""
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__({plan.THREADS}, 1)
"""

C_TYPES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float"}

# `tiles0` and so on follow, one for each row that the kernel has room for, and `logits` where there are any
FAST_INPUTS = ("q", "fresh_keys", "fresh_values", "plain", "spans", "layer", "counters")
FAST_BODY = """
extern __shared__ __align__(128) unsigned char shared[];
static_assert(tqd::Shape<DIM, GROUPED, K_BITS, V_BITS, ROTARY>::BYTES == SHARED, "plan.FastShape counts otherwise");
static_assert(tqd::THREADS == MOST_THREADS, "plan.THREADS is another number");
const int n_kv = gridDim.y, splits = gridDim.x;
const float* v_signs = layer + n_kv * DIM;
const float* mean = v_signs + DIM;
tqd::Tiles tiles;
switch (blockIdx.z) {{
{tiles}
}}
const tqd::Fragments<DIM, GROUPED, K_BITS, V_BITS, ROTARY, T> kernel{{
    tqd::vectors(q, q_strides, q_ndim), tiles,
    {{plain, next, n_kv, (int)plain_shape[3], tqd::vectors(fresh_keys, fresh_keys_strides, fresh_keys_ndim),
      tqd::vectors(fresh_values, fresh_values_strides, fresh_values_ndim)}},
    spans, layer, v_signs, HAS_MEAN ? mean : nullptr, N_PAIRS, PAIR_STEP, PAIR_GAP,
    {{reinterpret_cast<const tqd::u32*>(mean + n_kv * DIM)}}, {logits},
    __int_as_float(SCALE), __int_as_float(K_STEP), __int_as_float(V_STEP),
    sums, reinterpret_cast<float2*>(sums + (long long)gridDim.z * n_kv * GROUPED * splits * DIM),
    const_cast<tqd::u32*>(counters), out}};
kernel.run({{(int)blockIdx.z, (int)blockIdx.y, n_kv, (int)blockIdx.x, splits}}, shared);
"""
_ROW_OF_TILES = (
    "  case {row}: tiles = tqd::tiles_of(tiles{row}, tiles{row}_shape, tiles{row}_strides); break;"
)

SCAN_INPUTS = (
    "q", "rotated", "tiles", "spans", "k_head", "k_tail", "v_head", "v_tail", "k_levels", "v_levels",
    "mean", "pairs", "plain", "table",
)  # fmt: skip
SCAN_BODY = """
extern __shared__ float shared[];
const int blocks = (GROUPED * QUERIES + tqd::SCAN_ROWS - 1) / tqd::SCAN_ROWS, splits = gridDim.x / blocks;
const long long rows = (long long)gridDim.z * gridDim.y * GROUPED * QUERIES;
using KeyForm = tqd::Form<K_HALVES, K_TRELLIS>;
using ValueForm = tqd::Form<V_HALVES, V_TRELLIS>;
tqd::Scan<DIM_K, DIM_V, KeyForm, ValueForm, ORDER, Q, K, V> kernel{{
    tqd::vectors(q, q_strides, q_ndim), rotated, tqd::tiles_of(tiles, tiles_shape, tiles_strides),
    tqd::vectors(k_head, k_head_strides, k_head_ndim), tqd::vectors(k_tail, k_tail_strides, k_tail_ndim),
    tqd::vectors(v_head, v_head_strides, v_head_ndim), tqd::vectors(v_tail, v_tail_strides, v_tail_ndim),
    k_levels, v_levels, {mask}, {{mean, pairs, plain, table, N_PAIRS, N_PLAIN, (int)table_shape[0]}},
    GROUPED, QUERIES, (int)gridDim.y * GROUPED, __int_as_float(SCALE), sums, sums + rows * splits * 2 * DIM_V}};
kernel.run(tqd::span_of(spans, blockIdx.z), blockIdx.z, blockIdx.y, blockIdx.x % blocks, blockIdx.x / blocks, splits,
           shared);
"""

TURN_BODY = """
tqd::scan_turn<DIM_K>(tqd::vectors(q, q_strides, q_ndim), basis, {scales}, GROUPED, QUERIES, out);
"""

MERGE_BODY = """
const int splits = (int)sums_shape[0];
tqd::scan_merge<DIM_V>(sums, sums + (long long)gridDim.x * splits * 2 * DIM_V, {basis}, {logits}, HEADS, QUERIES, splits, out);
"""

RESTORE_INPUTS = (
    "tiles", "spans", "head", "tail", "levels", "basis", "scales", "mean", "channels", "table",
)  # fmt: skip
RESTORE_BODY = """
const float* none = nullptr;
const tqd::Restore<DIM, tqd::Form<HALVES, IS_TRELLIS>, ORDER, KEYS, X, T> kernel{
    tqd::tiles_of(tiles, tiles_shape, tiles_strides), CODES_AT, SCALES_AT,
    tqd::vectors(head, head_strides, head_ndim), tqd::vectors(tail, tail_strides, tail_ndim), levels, basis,
    {SCALED ? scales : none, HAS_MEAN ? mean : none, channels, table, N_PAIRS, WIDTH}, out};
kernel.run(tqd::span_of(spans, 0), blockIdx.y, blockIdx.x);
"""

ENCODE_INPUTS = ("keys", "values", "k_signs", "v_signs", "k_numbers", "v_numbers", "spans")
ENCODE_BODY = """
using Encoding = tqd::Encoding<DIM, K_BITS, V_BITS, K_LEVELS, V_LEVELS, STRETCHES>;
__shared__ tqd::u32 words[Encoding::WORDS];
const tqd::Centered<DIM, K, V> vectors{
    tqd::vectors(keys, keys_strides, keys_ndim), tqd::vectors(values, values_strides, values_ndim), k_signs, v_signs,
    (int)blockIdx.y};
const Encoding encoding{k_numbers, v_numbers};
encoding.tile(blockIdx.x, spans[0], keys_shape[1], vectors, words,
              out + ((long long)blockIdx.y * gridDim.x + blockIdx.x) * Encoding::WORDS);
"""

FOLD_INPUTS = ("plain", "folds", "layer", "k_numbers", "v_numbers")
FOLD_BODY = """
using Encoding = tqd::Encoding<DIM, K_BITS, V_BITS, K_LEVELS, V_LEVELS, STRETCHES>;
__shared__ tqd::u32 words[Encoding::WORDS];
const int n_kv = gridDim.y;
const float* v_signs = layer + n_kv * DIM;
const float* mean = v_signs + DIM;
using Mean = tqd::LeavingMean<DIM, HAS_MEAN, N_PAIRS, PAIR_STEP, PAIR_GAP>;
const tqd::LeavingTokens<DIM, Mean, T> tokens{
    plain, layer, v_signs, {mean, reinterpret_cast<const tqd::u32*>(mean + n_kv * DIM)},
    tqd::leaving(folds, blockIdx.z), (int)blockIdx.y, n_kv, (int)plain_shape[3]};
const Encoding encoding{k_numbers, v_numbers};
encoding.tile(blockIdx.x, tokens.at.first, tokens.at.count, tokens, words,
              out + (((long long)blockIdx.z * n_kv + blockIdx.y) * gridDim.x + blockIdx.x) * Encoding::WORDS);
"""

ROUND_BODY = """
const long long vectors = u_shape[0], vector = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / tqd::WARP;
if (vector < vectors)
  tqd::round_vector<DIM, LEVELS, STRETCHES>(u + vector * DIM, numbers, codes + vector * DIM, overlap + vector);
"""


def header(names: Sequence[str], folder: Path = FOLDER) -> str:
    """Return the includes of the sources *names*: MLX hashes a kernel's text at every call, so it should be short."""
    return "".join(f'#include "{folder / name}.cuh"\n' for name in names)


def fast_inputs(rows: int, *, sinks: bool) -> list[str]:
    """Return the names of the inputs of the tensor-core kernel for up to *rows* rows."""
    return [*FAST_INPUTS, *(f"tiles{row}" for row in range(rows)), *["logits"] * sinks]


def fast_text(
    constants: Mapping[str, int], kind: str, rows: int, *, sinks: bool
) -> tuple[str, str]:
    """Return header and body of the tensor-core kernel for up to *rows* rows, vectors of the C++ type *kind*."""
    tiles = "\n".join(_ROW_OF_TILES.format(row=row) for row in range(rows))
    body = _filled(FAST_BODY, tiles=tiles, logits=_logits("T", sinks))
    body = body.replace("MOST_THREADS", str(plan.THREADS))
    return header(_FAST_FILES) + _BOUNDS, _with_constants(body, constants, kind)


def scan_text(*, masked: bool) -> tuple[str, str]:
    """Return header and body of the general kernel."""
    mask = "mask, (int)mask_shape[0]" if masked else "nullptr, 0"
    return header(_SCAN_FILES), _filled(SCAN_BODY, mask=mask)


def turn_text(*, scaled: bool) -> tuple[str, str]:
    """Return header and body of the kernel that brings queries into the basis of packed keys."""
    scales = "scales" if scaled else "(const float*)nullptr"
    return header(_SCAN_FILES), _filled(TURN_BODY, scales=scales)


def merge_text(*, turned: bool, sinks: bool) -> tuple[str, str]:
    """Return header and body of the kernel that merges the general one's splits."""
    basis = "basis" if turned else "(const float*)nullptr"
    return header(_SCAN_FILES), _filled(MERGE_BODY, basis=basis, logits=_logits("L", sinks))


def fast_kernel(constants: Mapping[str, int], kind: mx.Dtype, rows: int, *, sinks: bool) -> Any:
    """Return the tensor-core kernel for up to *rows* rows; its inputs are fast_inputs."""
    name = _named(f"tqd_fragments{rows}", constants, kind)
    text = fast_text(constants, C_TYPES[kind], rows, sinks=sinks)
    inputs = fast_inputs(rows, sinks=sinks)
    return _kernel(name, inputs, ["out", "next", "sums"], text, constants["SHARED"])


@cache
def scan_kernel(shared_bytes: int, *, masked: bool) -> Any:
    """Return the general kernel; its inputs are SCAN_INPUTS, and `mask` where there is one."""
    names = [*SCAN_INPUTS, *["mask"] * masked]
    return _kernel("tqd_scan", names, ["sums"], scan_text(masked=masked), shared_bytes)


@cache
def turn_kernel(*, scaled: bool) -> Any:
    """Return the kernel that brings queries into the basis of packed keys; inputs `q`, `basis`, and `scales` where there are any."""
    inputs = ["q", "basis", *["scales"] * scaled]
    return _kernel("tqd_turn", inputs, ["out"], turn_text(scaled=scaled), 0)


@cache
def merge_kernel(*, turned: bool, sinks: bool) -> Any:
    """Return the kernel that merges the general one's splits; inputs `sums`, `basis`, and `logits` where there are any.

    *turned*: what came from packed values goes through `basis`; else nothing has, and it is not read.
    """
    inputs = ["sums", "basis", *["logits"] * sinks]
    return _kernel("tqd_merge", inputs, ["out"], merge_text(turned=turned, sinks=sinks), 0)


def restore_text() -> tuple[str, str]:
    """Return header and body of the kernel that unpacks one side of a row."""
    return header(("common", "codes", "restore")), RESTORE_BODY


@cache
def restore_kernel() -> Any:
    """Return the kernel that unpacks one side of a row; its inputs are RESTORE_INPUTS."""
    return _kernel("tqd_restore", list(RESTORE_INPUTS), ["out"], restore_text(), 0)


def encode_text() -> tuple[str, str]:
    """Return header and body of the kernel that encodes whole tiles."""
    return header(("common", "hopper", "codes", "decode", "round", "encode")), ENCODE_BODY


@cache
def encode_kernel() -> Any:
    """Return the kernel that encodes whole tiles; its inputs are ENCODE_INPUTS."""
    return _kernel("tqd_encode", list(ENCODE_INPUTS), ["out"], encode_text(), 0)


def fold_text(constants: Mapping[str, int], kind: str) -> tuple[str, str]:
    """Return header and body of the kernel that encodes the plain tokens, of the C++ type *kind*, that leave for tiles."""
    names = ("common", "hopper", "codes", "decode", "round", "encode", "mean", "fold")
    return header(names), _with_constants(FOLD_BODY, constants, kind)


def fold_kernel(constants: Mapping[str, int], kind: mx.Dtype) -> Any:
    """Return the kernel that encodes the plain tokens that leave for tiles; its inputs are FOLD_INPUTS."""
    name = _named("tqd_fold", constants, kind)
    return _kernel(name, list(FOLD_INPUTS), ["out"], fold_text(constants, C_TYPES[kind]), 0)


def _with_constants(body: str, constants: Mapping[str, int], kind: str) -> str:
    """Return *body* after its constants, which are no template arguments: MLX takes longer over a call for each of those."""
    given = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    return f"\n{given}using T = {kind};{body}"


def _named(name: str, constants: Mapping[str, int], kind: mx.Dtype) -> str:
    """Return the name of a variant: MLX knows what it has compiled by its name."""
    values = "_".join(f"{value & 0xFFFFFFFF:x}" for value in constants.values())
    return f"{name}_{values}_{C_TYPES[kind]}"


def round_text() -> tuple[str, str]:
    """Return header and body of the kernel that rounds vectors to codes."""
    return header(("common", "round")), ROUND_BODY


@cache
def round_kernel() -> Any:
    """Return the kernel that rounds vectors to codes; inputs `u`, (count, D), and `numbers`."""
    return _kernel("tqd_round", ["u", "numbers"], ["codes", "overlap"], round_text(), 0)


def _kernel(
    name: str, inputs: list[str], outputs: list[str], text: tuple[str, str], shared_bytes: int
) -> Any:
    return mx.fast.cuda_kernel(
        name=name,
        input_names=inputs,
        output_names=outputs,
        header=text[0],
        source=text[1],
        ensure_row_contiguous=False,  # or MLX would copy every slice, caches included
        shared_memory=shared_bytes,
    )


def _filled(body: str, **parts: str) -> str:
    return body.format(**parts)


def _logits(kind: str, sinks: bool) -> str:
    return "logits" if sinks else f"(const {kind}*)nullptr"
