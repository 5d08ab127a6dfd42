"""Changes of one token in the CUDA sources: each must be noticed, or the comparisons prove little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import cuda, encode, order, step_proof
from daemon.kernels.case import Case
from daemon.kernels.cuda import encoding, launch, plan, restoring
from daemon.kernels.packing import TileLayout
from daemon.policy.schemes import INT8, TRELLIS3, TURBO2, TURBO3, TURBO3_5, TURBO4, TURBO5, Codec
from tests.cudashim import shim
from tests.kernels.float64 import wide
from tests.kernels.restored_vectors import vectors
from tests.kernels.test_cuda_attention import Problem, build, expected, limit, rounds_well
from tests.metalshim.compiler import ShimError
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

Probe = Callable[[], bool]


def right(problem: Problem, scale: float = 0.1) -> bool:
    queries, stored, mask, logits = build(problem)
    got = wide(launch.attend(queries, stored, scale, mask, logits))
    want = expected(queries, stored, scale, mask, logits)
    return bool(np.linalg.norm(got - want) < limit(problem) * np.linalg.norm(want))


def stepping() -> bool:
    """Two rows, one without tiles, and a fold: what a load of the kernels is proved by."""
    case = Case(
        TURBO4, TURBO3, 64, 64, n_heads=6, n_kv_heads=2, queries=1, dtype=mx.float16,
        learned_sinks=True, scaled_keys=True, key_mean="rotary",
    )  # fmt: skip
    return step_proof.problem(cuda, case, 8) is None


def long() -> bool:
    """One split: a warp has more tiles than its ring has stages. Learned sinks, and scores that exceed the first tile's."""
    problem = Problem(
        dim_k=64, dim_v=64, packed_to=1900, n_kv=1, query_size=4, logits=True, k=TURBO5, v=TURBO2
    )
    return with_splits(1, problem)


def meeting() -> bool:
    """Three splits, twice with the same counters, and a mean that rotates."""
    problem = Problem(dim_k=64, dim_v=64, packed_to=900, n_kv=1, mean="rotary", dropped=50)
    launch._counter_sets.cache_clear()
    with patch.object(launch, "_COUNTER_SETS", 1):
        found = [with_splits(3, problem) for _ in range(2)]
    launch._counter_sets.cache_clear()
    return all(found)


def with_splits(splits: int, problem: Problem) -> bool:
    with patch.object(plan, "fast_splits", lambda *_: splits):
        return right(problem)


def wide_codes() -> bool:
    return right(Problem(dim_k=64, dim_v=64, k=INT8, v=INT8, n_kv=1, tail=0))


def narrow_codes() -> bool:
    return right(Problem(dim_k=64, dim_v=64, k=TURBO3, v=TURBO4, n_kv=1, sinks=0))


def narrowest() -> bool:
    return right(Problem(dim_k=64, dim_v=64, k=TURBO2, v=TURBO2, n_kv=1))


def general() -> bool:
    """One split, of several times 32 tokens."""
    problem = Problem(
        dim_k=80, dim_v=64, k=TURBO3, v=TURBO5, grouped=5, queries=2, mean="partial",
        mask="additive", logits=True, packed_to=100, tail=9, in_order=order.CANONICAL,
    )  # fmt: skip
    with patch.object(plan, "MULTIPROCESSORS", 2):
        return right(problem)


def odd_codes() -> bool:
    """Pairs in 7 bits, and a trellis."""
    return right(Problem(dim_k=64, dim_v=64, k=TURBO3_5, v=TRELLIS3, n_kv=1, packed_to=70, tail=3))


def rounds() -> bool:
    return rounds_well(3, 80, (20,), seed=1)


def encodes(k: Codec, v: Codec) -> bool:
    layout = TileLayout(k, v, 64, 64, order.FRAGMENTS)
    keys, values = (mx.random.normal((2, 61, 64), key=mx.random.key(seed)) for seed in (1, 2))
    made = encoding.tiles(keys, values, layout, first=4)
    want = encode.encoded(keys, values, layout, first=4, old=None)
    return encode.difference(made, want, layout) is None


def encodes_halves() -> bool:
    return encodes(TURBO4, TURBO5)


def encodes_the_rest() -> bool:
    return encodes(INT8, TURBO3)


def restores() -> bool:
    """Keys that have lost a scale and a mean of which half rotates, with sinks, a tail and tokens dropped."""
    problem = Problem(
        dim_k=64, dim_v=64, k=TURBO3, mean="partial", sinks=3, packed_to=70, tail=9, dropped=5,
    )  # fmt: skip
    stored = build(problem)[1]
    for side in ("k", "v"):
        got, want = wide(restoring.restored(stored, side, mx.float16)), vectors(stored, side)
        if not np.linalg.norm(got - want) < 4e-4 * np.linalg.norm(want):
            return False
    return True


MUTANTS: list[tuple[Probe, str, str, str]] = [
    (stepping, "fragments", "a[i] = first * query.mu_a[i] + second", "a[i] = first * query.mu_a[i] - second"),
    (stepping, "fragments", "total += v;", "total -= v;"),
    (stepping, "fragments", 'asm volatile("bar.sync 1, %0;" ::"n"(TILE_WARPS * WARP) : "memory");', ""),
    (stepping, "fragments", 'asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");', ""),
    (stepping, "fragments", "bias.rotate(columns, lane);\n      __syncwarp();", "bias.rotate(columns, lane);"),
    (long, "fragments", "      __syncwarp();\n      if (copies && t +", "      if (copies && t +"),
    (long, "fragments", "stage = 0, turn ^= 1", "stage = 0"),
    (long, "fragments", "t + S::STAGES * apart < end", "t + S::STAGES * apart <= end"),
    (wide_codes, "fragments", "if (first >= end && ahead_of_span) barrier_wait(barriers, 0);", ""),
    (stepping, "fragments", "const bool ahead_of_span = first < tiles.room;", "const bool ahead_of_span = true;"),
    (stepping, "fragments", "p < span.packed_from || p >= span.packed_to", "p >= span.packed_to"),
    (long, "fragments", "if (v_most > v_top) v_top = v_most * 1.25f;", "if (v_most > v_top) v_top = v_most * .75f;"),
    (long, "fragments", "total[n] *= fade, weights[n] *= fade;", "total[n] *= fade;"),
    (long, "fragments", "const int source = 8 * c + (g >> 1);", "const int source = 8 * c + g;"),
    (narrow_codes, "fragments", "KB == 8 ? 0.f : .5f * sum * factor", "0.f"),
    (narrow_codes, "fragments", "VB == 8 ? 0.f : .5f", "VB == 8 ? 0.f : 0.f"),
    (stepping, "fragments", "all.add(factor, reinterpret_cast", "all.add(1.f, reinterpret_cast"),
    (stepping, "fragments", "if (logits) all.total += all.raise(", "if (!logits) all.total += all.raise("),
    (meeting, "head", "== (u32)splits - 1", "== (u32)splits - 2"),
    (meeting, "head", "if (last) counters[head] = 0;", ""),
    (meeting, "head", "all.raise(most) * exp2_fast(of.x - most)", "all.raise(most)"),
    (stepping, "head", "return exp2_fast(other - above);", "return 1.f;"),
    (stepping, "plain", "i + span.left", "i"),
    (stepping, "plain", "if (passes) put(row, kv, count - 1", "if (passes) put(row, kv, count - 2"),
    (stepping, "plain", "s[u] = u < there ? x : MASKED;", "s[u] = x;"),
    (stepping, "plain", "if (u < there) put(", "put("),
    (meeting, "mean", "2 * position + 31", "2 * position + 30"),
    (meeting, "mean", "even[i] * 256 + correction[i >> 1]", "even[i] * 256"),
    (meeting, "mean", "sine[e] = fmaf(sine[e], step_cosine[e], x * step_sine[e]);", ""),
    (meeting, "mean", "0x7531u), to[COLUMN] = permute_bytes(p, q, 0x6420u);\n        p", "0x6420u), to[COLUMN] = permute_bytes(p, q, 0x7531u);\n        p"),
    (meeting, "mean", "(float)(e1 - o1), 28)", "(float)(e1 + o1), 28)"),
    (long, "decode", "(permute_bytes(t.a, t.b, m) & ~odd)", "(permute_bytes(t.a, t.b, m) & odd)"),
    (narrow_codes, "decode", "((a >> 3) & 0x11111111u)", "((a >> 2) & 0x11111111u)"),
    (narrow_codes, "decode", "^ permute_bytes(y, y, SIGNS);\n    }\n  } else if constexpr (BITS == 5)", ";\n    }\n  } else if constexpr (BITS == 5)"),
    (narrowest, "decode", "(b >> 2) & 0x33333333u", "(b >> 1) & 0x33333333u"),
    (wide_codes, "hopper", "%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};", "%5,%4,%6,%7},{%8,%9},{%0,%1,%2,%3};"),
    (general, "scan", "      __syncthreads();\n      load(", "      load("),
    (general, "scan", "k_stride, ks, vs, levels);\n      __syncthreads();", "k_stride, ks, vs, levels);"),
    (general, "scan", "q[b] * mean[a] - q[a] * mean[b]", "q[b] * mean[a] + q[a] * mean[b]"),
    (general, "scan", "p + span.dropped", "p + 1"),
    (general, "scan", "total[i] = total[i] * fade + warp_sum(w);", "total[i] += warp_sum(w);"),
    (general, "scan", "mask_heads > 1 ? h : 0", "0"),
    (general, "scan", "if (logits) total += exp2f(sink - top);", ""),
    (general, "scan", "scales[h / group * DK + d]", "scales[h % group * DK + d]"),
    (general, "scan", "row % L);\n  for", "0);\n  for"),
    (general, "scan", " : 1.f);\n  __syncthreads();", " : 1.f);"),
    (general, "scan", "x[d] = sum / total;\n  }\n  __syncthreads();", "x[d] = sum / total;\n  }"),
    (general, "scan", "fmaf(x[i], basis[i * DV + d], y)", "fmaf(x[i], basis[d * DV + i], y)"),
    (general, "scan", "float y = x[DV + d];", "float y = 0.f;"),
    (general, "codes", "shift += width;", "shift += 1;"),
    (odd_codes, "codes", "d % 2 ? pair / 11 : pair % 11", "d % 2 ? pair % 11 : pair / 11"),
    (odd_codes, "codes", "(d + D - 2) % D", "(d + D - 1) % D"),
    (odd_codes, "codes", "2 * distance + max", "distance + max"),
    (odd_codes, "codes", "+ 16) & 31", "+ 16) & 15"),
    (restores, "restore", "levels[threadIdx.x];\n    __syncthreads();", "levels[threadIdx.x];"),
    (restores, "restore", ": 0.f;\n    }\n    __syncthreads();", ": 0.f;\n    }"),
    (restores, "restore", "p >= span.length || is_packed(p)", "is_packed(p)"),
    (restores, "restore", "p - span.packed_to) + d", "p - span.packed_from) + d"),
    (restores, "restore", "c * TILE + TILE <= span.packed_from", "c * TILE + TILE <= 40"),
    (restores, "restore", "if (!is_packed(p)) continue;\n", "\n"),
    (restores, "restore", "p + span.dropped", "p"),
    (restores, "restore", "? turned : -turned", "? -turned : turned"),
    (restores, "restore", "if (pair < 0) return of_head[d];", ""),
    (restores, "restore", "lost.scales[kv * D + d]", "lost.scales[d]"),
    (restores, "restore", "basis[j * D + d]", "basis[d * D + j]"),
    (encodes_halves, "codes", "(m & 1u) << f.plane()", "(m & 1u) << f.sign()"),
    (encodes_the_rest, "codes", "reg % 2) + 4 * byte", "reg % 2) + 2 * byte"),
    (encodes_the_rest, "encode", "most) / 127.f", "most) / 120.f"),
    (encodes_halves, "encode", "i >= count", "i > count"),
    (encodes_halves, "encode", "words[i] = 0;\n    __syncthreads();", "words[i] = 0;"),
    (rounds, "round", "LEVELS - 1 - above", "LEVELS - above"),
    (rounds, "round", "square > best_square", "square < best_square"),
    (stepping, "fold", "- mean.at(kv, d, at.position + i)", "- mean.at(kv, d, at.position)"),
    (stepping, "fold", "fmaf(other, turn.y, own * turn.x)", "fmaf(other, turn.y, own)"),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["ub", "rough", "check"])
@pytest.mark.parametrize(
    "probe",
    [stepping, long, meeting, wide_codes, narrow_codes, narrowest, general, odd_codes, restores, rounds, encodes_halves, encodes_the_rest],
    ids=lambda probe: probe.__name__,
)  # fmt: skip
def test_the_kernels_as_they_are_pass(probe: Probe, mode: str) -> None:
    for order_of_threads in ("reverse", "random"):
        with shim.installed(mode, order_of_threads, seed=3):
            assert probe()


@pytest.mark.parametrize(
    ("probe", "name", "token", "other"), MUTANTS, ids=[f"{m[1]}: {m[2][:40]}" for m in MUTANTS]
)
def test_a_mutant_is_noticed(probe: Probe, name: str, token: str, other: str) -> None:
    def read(path: Path) -> str:
        text = path.read_text()
        if path.stem != name:
            return text
        assert token in text
        return text.replace(token, other, 1)

    assert any(notices(probe, mode, read) for mode in ("ub", "check"))


def notices(probe: Probe, mode: str, read: Callable[[Path], str]) -> bool:
    with shim.installed(mode, "random", 3, read):
        try:
            return not probe()
        except ShimError as error:
            if "compile failed" in str(error):
                raise  # that is no mutant
            return True
