"""GPU time of decode attention per layer and step: our CUDA kernels against MLX's own attention on an fp16 cache.

    python tests/bench/kernels.py [--quick] [--json FILE] [--plot FILE]
    python tests/bench/kernels.py --from FILE --plot FILE     # a plot of an earlier run, without a GPU

The host takes longer to ask for a layer than the GPU to compute it. So a spinning kernel keeps the GPU busy
until all layers of a step are queued, and two kernels around them read the GPU's own clock; a round in which
the host took longer than that is not counted. MLX's own attention is measured twice, on caches of their own,
and the faster of the two is what ours is compared with.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from daemon.kernels import order
from daemon.kernels.cuda import launch, plan
from daemon.kernels.cuda.layer import layer_of
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.kernels.packing import TILE, TileLayout
from daemon.kernels.stepping import Span
from daemon.policy.schemes import SCHEMES

LAYERS = 32
N_HEADS, N_KV, DIM = 32, 8, 128
REPEATS = 7
SPIN_US = 14_000
SINKS, TAIL = 4, 48

CASES = [(1, 2048), (1, 8192), (1, 32768), (1, 131072), (8, 8192)]
SCHEME_NAMES = ("turbo4v4", "turbo4v3", "turbo8v4", "turbo3v3", "turbo5v4", "int8")
TARGETS = {  # reference ratios to reach, without the key mean
    (1, 8192): {"turbo4v4": 2.5, "turbo4v3": 2.6, "turbo8v4": 2.2},
    (1, 32768): {"turbo4v4": 3.0, "turbo4v3": 3.1, "turbo8v4": 2.4},
    (1, 131072): {"turbo4v4": 3.5, "turbo4v3": 3.7, "turbo8v4": 2.6},
    (8, 8192): {"turbo4v4": 3.2, "turbo4v3": 3.4, "turbo8v4": 2.5},
}

Chain = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Result:
    """One measurement; *us* is GPU time of one layer."""

    rows: int
    tokens: int
    name: str
    mean: bool
    plain_tokens: int
    us: float
    bytes: int

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.us / 1e3


class Clock:
    """Times chains of kernels by the GPU's clock."""

    def __init__(self) -> None:
        read = 'asm volatile("mov.u64 %0,%%globaltimer;":"=l"({}));'
        self._stamp = mx.fast.cuda_kernel(
            name="stamp",
            input_names=["x", "after"],
            output_names=["y", "t"],
            source="const int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i]; if (i == 0) { unsigned long long v; "
            + read.format("v")
            + " t[0] = v; }",
        )
        self._spin = mx.fast.cuda_kernel(
            name="spin",
            input_names=["x"],
            output_names=["y"],
            source="y[threadIdx.x] = x[threadIdx.x]; if (threadIdx.x == 0) { unsigned long long a, b; "
            + read.format("a")
            + " do { "
            + read.format("b")
            + " } while (b - a < (unsigned long long)US * 1000); }",
        )
        self._zeros = mx.zeros((32,))

    def us_per_layer(self, chain: Chain, queries: mx.array) -> float:
        """Return the median GPU time of a layer of *chain*, which begins with *queries*."""
        rounds = [self._once(chain, queries) for _ in range(REPEATS + 2)]
        times = [us for us, queued_us in rounds if queued_us < SPIN_US]
        if len(times) < REPEATS // 2:
            raise RuntimeError(f"the host needed more than {SPIN_US} us to queue {LAYERS} layers")
        return statistics.median(times) / LAYERS

    def _once(self, chain: Chain, queries: mx.array) -> tuple[float, float]:
        """Return the GPU's time of the chain, and the host's to queue it, both in µs."""
        began = time.perf_counter()
        (busy,) = self._spin(
            inputs=[self._zeros], template=[("US", SPIN_US)], output_shapes=[(32,)],
            output_dtypes=[mx.float32], grid=(32, 1, 1), threadgroup=(32, 1, 1),
        )  # fmt: skip
        mx.async_eval(busy)
        start, begin = self._stamped(queries, busy)
        done, end = self._stamped(chain(start), busy)
        mx.async_eval(done, begin, end)
        queued_us = 1e6 * (time.perf_counter() - began)
        mx.eval(done, begin, end)
        return (int(end.item()) - int(begin.item())) / 1e3, queued_us

    def _stamped(self, x: mx.array, after: mx.array) -> tuple[mx.array, mx.array]:
        """Return *x*, and when it was there."""
        y, t = self._stamp(
            inputs=[x, after], output_shapes=[x.shape, (1,)], output_dtypes=[x.dtype, mx.uint64],
            grid=(x.size, 1, 1), threadgroup=(128, 1, 1),
        )  # fmt: skip
        return y, t


def random_tiles(layout: TileLayout, count: int) -> mx.array:
    """Return tiles of random codes and sane scales, (KV heads, count, words), in the GPU's memory."""
    codes = mx.random.randint(0, 2**32, (N_KV, count, layout.side("k").scales_at), dtype=mx.uint32)
    scales = mx.random.randint(
        0, 2**32, (N_KV, count, layout.words - layout.side("k").scales_at), dtype=mx.uint32
    )
    tiles = mx.concatenate([codes, (scales & 0x03FF03FF) | 0x2C002C00], axis=-1)
    mx.eval(tiles)
    return tiles


def mean_of_keys() -> KeyTransform:
    scale = mx.exp(0.3 * mx.random.normal((N_KV, DIM)))
    return KeyTransform(
        scale, 0.3 * mx.random.normal((N_KV, DIM)), Rotary(nn.RoPE(DIM, base=500000.0), DIM)
    )


def start_queries(rows: int) -> mx.array:
    queries = mx.random.normal((rows, N_HEADS, 1, DIM)).astype(mx.float16)
    mx.eval(queries)
    return queries


def packed_chain(
    name: str, rows: int, tokens: int, *, mean: bool, plain: bool
) -> tuple[Chain, int]:
    """Return a chain of LAYERS attention calls on packed caches, and the bytes that each has to read."""
    scheme = SCHEMES[name]
    layout = TileLayout(scheme.k, scheme.v, DIM, DIM, order.FRAGMENTS)
    tiles_each = tokens // TILE
    keys = mean_of_keys() if mean else None
    layer = layer_of(layout, N_KV, keys)
    assert layer is not None
    sinks, tail = (SINKS, TAIL) if plain else (0, 0)
    span = Span(tokens + tail, sinks, tokens)
    caches = [[random_tiles(layout, tiles_each) for _ in range(rows)] for _ in range(LAYERS)]
    raws = []
    for _ in range(LAYERS):
        raw = mx.random.normal((rows, 2, N_KV, max(sinks + tail, 1), DIM)).astype(mx.float16)
        mx.eval(raw)
        raws.append(raw)
    splits = plan.fast_splits(N_KV, [tiles_each] * rows)
    spans = launch.spans_of((span,) * rows)

    def chain(x: mx.array) -> mx.array:
        for cache, raw in zip(caches, raws, strict=True):
            x, _ = launch.fast(x, None, raw, cache, spans, layer, DIM**-0.5, splits)
        return x

    raw_bytes = rows * N_KV * (sinks + tail) * 2 * DIM * 2
    return chain, rows * N_KV * tiles_each * layout.words * 4 + raw_bytes


def plain_chain(rows: int, tokens: int) -> tuple[Chain, int]:
    """Return the same on fp16 caches, through MLX's own attention."""
    caches = []
    for _ in range(LAYERS):
        pair = [mx.random.normal((rows, N_KV, tokens, DIM)).astype(mx.float16) for _ in range(2)]
        mx.eval(pair)
        caches.append(pair)

    def chain(x: mx.array) -> mx.array:
        for keys, values in caches:
            x = mx.fast.scaled_dot_product_attention(x, keys, values, scale=DIM**-0.5)
        return x

    return chain, rows * N_KV * tokens * DIM * 2 * 2


def measure(cases: Sequence[tuple[int, int]], names: Sequence[str]) -> list[Result]:
    clock, results = Clock(), []

    def fp16(rows: int, tokens: int) -> None:
        times = []
        for _ in range(2):
            chain, size = plain_chain(rows, tokens)
            times.append(clock.us_per_layer(chain, start_queries(rows)))
            del chain
            mx.clear_cache()
        note(Result(rows, tokens, "fp16", False, 0, min(times), size))

    def packed(rows: int, tokens: int, name: str, mean: bool, plain: bool) -> None:
        chain, size = packed_chain(name, rows, tokens, mean=mean, plain=plain)
        us = clock.us_per_layer(chain, start_queries(rows))
        note(Result(rows, tokens, name, mean, (SINKS + TAIL) * plain, us, size))
        del chain
        mx.clear_cache()

    def note(r: Result) -> None:
        results.append(r)
        print(
            f"{r.rows} × {r.tokens:6d} {r.name:9s} mean={r.mean:d} plain={r.plain_tokens:2d}: {r.us:7.2f} us,"
            f" {r.gb_per_second:5.0f} GB/s",
            flush=True,
        )

    for rows, tokens in cases:
        fp16(rows, tokens)
        for name in names:
            for mean in (False, True):
                packed(rows, tokens, name, mean, False)
            packed(rows, tokens, name, True, True)
    return results


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table, ratios to fp16 of the same run."""
    base = {(r.rows, r.tokens): r.us for r in results if r.name == "fp16"}
    lines = [
        "| rows × tokens | cache | key mean | full-precision tokens | µs | GB/s | × fp16 | to reach |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        goal = TARGETS.get((r.rows, r.tokens), {}).get(r.name)
        wanted = f"{goal:.1f}" if goal is not None and not r.mean else ""
        lines.append(
            f"| {r.rows} × {r.tokens} | {r.name} | {'yes' if r.mean else 'no'} | {r.plain_tokens} |"
            f" {r.us:.1f} | {r.gb_per_second:.0f} | {base[r.rows, r.tokens] / r.us:.2f} | {wanted} |"
        )
    return "\n".join(lines)


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw GB/s over bytes: what a fixed cost and the memory's bandwidth leave."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in dict.fromkeys(r.name for r in results):
        mine = sorted(
            (r for r in results if r.name == name and r.rows == 1 and not r.mean),
            key=lambda r: r.bytes,
        )
        axes.plot(
            [r.bytes / 1e6 for r in mine], [r.gb_per_second for r in mine], marker="o", label=name
        )
    axes.axhline(4350, color="grey", linestyle=":", label="4.35 TB/s, best read rate seen")
    axes.set(xscale="log", yscale="log", xlabel="MB read per layer and step", ylabel="GB/s")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {"gpu": gpu, "mlx": mx.__version__, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three schemes only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--from", dest="earlier", type=Path)
    options = parser.parse_args()
    if options.earlier:
        data = json.loads(options.earlier.read_text())
        about, results = data["machine"], [Result(**each) for each in data["results"]]
    else:
        about = machine()
        results = measure(CASES, SCHEME_NAMES[:3] if options.quick else SCHEME_NAMES)
    print(about)
    print(table(results))
    if options.json:
        data = {"machine": about, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
