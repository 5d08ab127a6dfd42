"""Print what decoding costs on this machine: one decode step over a long cache, for each codec.

`python tests/bench/bench_codec.py` takes 8 KV heads, 4,096 tokens and a head_dim of 128, and compares
with MLX's own attention on a float32 cache of that size. Milliseconds, the least of several runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import mlx.core as mx

from daemon.cache.row import Row
from daemon.kernels import codec, packing, reference
from daemon.policy.schemes import SCHEMES

NAMES = (
    "int8", "turbo5v4", "turbo4v4", "turbo3.5v3.5", "turbo3tv3t", "turbo3v3", "turbo2v2", "affine8", "affine4"
)  # fmt: skip


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--schemes", nargs="+", default=list(NAMES))
    arguments = parser.parse_args()
    shape = (arguments.heads, arguments.tokens, arguments.dim)

    keys, values = mx.random.normal(shape), mx.random.normal(shape)
    query = mx.random.normal((arguments.heads, 1, arguments.dim))
    mx.eval(keys, values, query)
    exact = least_ms(
        lambda: [
            mx.fast.scaled_dot_product_attention(
                query[None], keys[None], values[None], scale=arguments.dim**-0.5
            )
        ],
        arguments.runs,
    )
    print(f"{'scheme':<14}{'attend':>9}{'unpack':>9}{'decode':>9}{'pack':>9}")
    print(f"{'float32':<14}{exact:9.2f}")
    for name in arguments.schemes:
        row = Row(SCHEMES[name], sink_tokens=0, tail_tokens=0)
        row.append(keys, values)
        packing_ms = least_ms(lambda row=row: packed(row), 2)
        row.pack()
        stored = row.stored()
        mx.eval(row.arrays)
        sides = packing.unpack(stored.tiles_in_use(), stored.layout)
        mx.eval(sides.k, sides.v)
        figures = (
            least_ms(
                lambda stored=stored: [
                    reference.attend(query, stored, arguments.dim**-0.5, None, None)
                ],
                arguments.runs,
            ),
            least_ms(lambda stored=stored: unpacked(stored), arguments.runs),
            least_ms(
                lambda sides=sides, name=name: [
                    codec.decode(*sides.k, SCHEMES[name].k)[0],
                    codec.decode(*sides.v, SCHEMES[name].v)[0],
                ],
                arguments.runs,
            ),
            packing_ms,
        )
        print(f"{name:<14}" + "".join(f"{figure:9.2f}" for figure in figures))


def packed(row: Row) -> list[mx.array]:
    """Pack a copy of *row*."""
    copy = row.copy()
    copy.pack()
    return copy.arrays


def unpacked(stored: packing.Packed) -> list[mx.array]:
    """Return the codes and scales of both sides."""
    sides = packing.unpack(stored.tiles_in_use(), stored.layout)
    return [*sides.k, *sides.v]


def least_ms(run: Callable[[], list[mx.array]], runs: int) -> float:
    """Return the shortest time of *runs* runs after a first one."""
    mx.eval(run())
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - started)
    return min(times) * 1000


if __name__ == "__main__":
    main()
