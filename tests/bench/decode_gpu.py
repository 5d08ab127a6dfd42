"""Decode speed of an 8B-shaped llama with random weights on one GPU: our caches against mlx-lm's own, in one run.

    python tests/bench/decode_gpu.py [--bits 4] [--spread 0] [--json FILE] [--cases 1x2048 8x8192 …]

Caches are filled with random keys and values, so nothing is prefilled and no weights are needed. A case is a
batch size and a length; with a spread each row is that much longer than the one before, so that rows fold at
different steps. Times are of whole steps, on the clock of the wall: model, attention, the argmax and
Python, with the next step's graph built while the GPU is busy, as mlx-lm's own generator does. Weights of 16 bits show
more of the caches in a batch: MLX's product of 4-bit weights with the vectors of several rows is slow on a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten, tree_map

from daemon.cache import seam
from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.kernels.attention import on_this_device
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.policy.schemes import SCHEMES

seam.install()

from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache  # noqa: E402

LAYERS, N_KV, DIM, VOCAB = 32, 8, 128, 128256
SINKS, TAIL = 4, 32
WARM, STEPS = 72, 64  # two folds of a tile to compile what they need and make the graphs, and two
SLOW = 1.5  # times the median: such steps are named
CASES = ["1x2048", "1x8192", "1x32768", "1x131072", "8x2048", "8x8192", "8x32768", "32x8192"]
MOST_BYTES = 110e9  # of caches, on a GPU of 141 GB

Caches = list[Any]
Lengths = list[int]


@dataclass(frozen=True)
class Result:
    rows: int
    tokens: int
    cache: str
    tokens_per_second: float
    mean_ms: float
    median_ms: float
    most_ms: float
    peak_gb: float
    cache_gb: float


def make_model(layers: int, bits: int) -> llama.Model:
    """Return an 8B-shaped llama in 16 bits or fewer (groups of 64), made layer by layer so that no other copy is needed."""
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", hidden_size=4096, num_hidden_layers=layers, intermediate_size=14336,
            num_attention_heads=32, num_key_value_heads=N_KV, head_dim=DIM, rms_norm_eps=1e-5,
            vocab_size=VOCAB, rope_theta=500000.0, tie_word_embeddings=False,
        )
    )  # fmt: skip
    model.update(tree_map(lambda x: x.astype(mx.float16), model.parameters()))
    if bits < 16:
        nn.quantize(model, group_size=64, bits=bits)
    for _, weight in tree_flatten(model.parameters()):
        mx.eval(weight)
    mx.clear_cache()
    return model


def random_side(rows: int, tokens: int) -> mx.array:
    return mx.random.normal((rows, N_KV, tokens, DIM)).astype(mx.float16)


def fp16_caches(lengths: Lengths, model: llama.Model) -> Caches:
    caches, rows, most = [], len(lengths), max(lengths)
    if not most:
        return [KVCache() for _ in model.layers]
    for _ in model.layers:
        cache = KVCache() if rows == 1 else BatchKVCache([most - length for length in lengths])
        cache.update_and_fetch(random_side(rows, most), random_side(rows, most))
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    return caches


def quantized_caches(lengths: Lengths, model: llama.Model) -> Caches:
    caches, rows, tokens = [], len(lengths), max(lengths)
    for _ in model.layers:
        cache = QuantizedKVCache(group_size=64, bits=4)
        cache.update_and_fetch(random_side(rows, tokens), random_side(rows, tokens))
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    return caches


def ours(name: str, *, sinks: int, mean: bool) -> Callable[[Lengths, llama.Model], Caches]:
    """Return what makes our caches, with *sinks* and a tail in full precision; *mean*: keys lose their mean."""

    def make(lengths: Lengths, model: llama.Model) -> Caches:
        attention, caches = on_this_device(), []
        for place, layer in enumerate(model.layers):
            keys = None
            if mean:
                scale = mx.exp(0.3 * mx.random.normal((N_KV, DIM)))
                rotary = Rotary(layer.self_attn.rope, DIM)
                keys = KeyTransform(scale, 0.3 * mx.random.normal((N_KV, DIM)), rotary)
            row = Row(
                SCHEMES[name], sink_tokens=sinks, tail_tokens=TAIL,
                keys=keys, attention=attention, place=place,
            )  # fmt: skip
            filled = []
            for length in lengths:
                each = row.fresh()
                if not length:
                    filled.append(each)
                    continue
                each.append(random_side(1, length)[0], random_side(1, length)[0])
                each.pack()
                mx.eval(each.arrays)
                filled.append(each)
            caches.append(SequenceCache(filled[0]) if len(filled) == 1 else BatchCache(filled))
        return caches

    return make


KINDS: dict[str, Callable[[Lengths, llama.Model], Caches]] = {
    "mlx-lm fp16": fp16_caches,
    "mlx-lm 4 bit": quantized_caches,
    "turbo4v4": ours("turbo4v4", sinks=SINKS, mean=False),
    "turbo4v4, no sinks": ours("turbo4v4", sinks=0, mean=False),
    "turbo4v4 + mean": ours("turbo4v4", sinks=SINKS, mean=True),
    "turbo4v3 + mean": ours("turbo4v3", sinks=SINKS, mean=True),
    "turbo8v4 + mean": ours("turbo8v4", sinks=SINKS, mean=True),
}


def measure(model: llama.Model, rows: int, tokens: int, spread: int, kind: str) -> Result:
    mx.clear_cache()
    mx.reset_peak_memory()
    caches = KINDS[kind]([tokens + spread * row for row in range(rows)], model)
    size = sum(cache.nbytes for cache in caches)
    mx.clear_cache()
    mx.reset_peak_memory()

    def step(y: mx.array) -> mx.array:
        return mx.argmax(model(y[:, None], cache=caches)[:, -1], axis=-1)

    y = mx.zeros((rows,), dtype=mx.int32)
    ends = []
    for _ in range(WARM + STEPS):
        following = step(y)
        mx.async_eval(following)
        mx.eval(y)
        y = following
        ends.append(time.perf_counter())
    steps = [end - begin for begin, end in pairwise(ends[WARM - 1 :])]
    seconds = sum(steps)
    result = Result(
        rows, tokens, kind, rows * STEPS / seconds, seconds / STEPS * 1e3, median(steps) * 1e3,
        max(steps) * 1e3, mx.get_peak_memory() / 1e9, size / 1e9,
    )  # fmt: skip
    print(
        f"{rows} × {tokens:6d} {kind:16s} {result.tokens_per_second:8.1f} tokens/s,"
        f" a step {result.mean_ms:6.2f} ms (median {result.median_ms:.2f},"
        f" most {result.most_ms:.2f}), peak {result.peak_gb:.1f} GB, caches {result.cache_gb:.2f} GB",
        flush=True,
    )
    slow = [
        f"{at}: {ms:.1f}"
        for at, ms in enumerate(1e3 * step for step in steps)
        if ms > SLOW * result.median_ms
    ]
    print(f"    slow steps (number: ms): {', '.join(slow) or 'none'}")
    return result


def about_machine() -> dict[str, str]:
    """Return what figures depend on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "gpu": gpu, "mlx": mx.__version__, "mlx_lm": mlx_lm.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def table(results: list[Result]) -> str:
    base = {(r.rows, r.tokens): r.tokens_per_second for r in results if r.cache == "mlx-lm fp16"}
    lines = [
        "| rows × tokens | cache | tokens/s | × fp16 | step ms: mean | median | most | caches GB | peak GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        first = base.get((r.rows, r.tokens))
        ratio = f"{r.tokens_per_second / first:.2f}" if first else "–"
        lines.append(
            f"| {r.rows} × {r.tokens} | {r.cache} | {r.tokens_per_second:.1f} | {ratio} |"
            f" {r.mean_ms:.2f} | {r.median_ms:.2f} | {r.most_ms:.2f} | {r.cache_gb:.2f} | {r.peak_gb:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=CASES, help="ROWSxTOKENS")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--bits", type=int, default=4, choices=[4, 8, 16], help="of a weight")
    parser.add_argument("--spread", type=int, default=0, help="tokens from a row to the next")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = about_machine() | {
        "layers": str(options.layers), "bits": str(options.bits), "spread": str(options.spread),
    }  # fmt: skip
    print(about)
    model = make_model(options.layers, options.bits)
    results = []
    for case in options.cases:
        rows, tokens = map(int, case.split("x"))
        for kind in options.kinds:
            if (
                kind == "mlx-lm fp16"
                and rows * tokens * N_KV * DIM * 4 * options.layers > MOST_BYTES
            ):
                print(f"{case} {kind}: does not fit")
                continue
            try:
                results.append(measure(model, rows, tokens, options.spread, kind))
            except (
                RuntimeError
            ) as error:  # MLX has no CUDA kernel for every shape of its quantized products
                print(f"{case} {kind}: {str(error).splitlines()[0]}", flush=True)
                continue
            if options.json:
                data = {"machine": about, "results": [asdict(result) for result in results]}
                options.json.write_text(json.dumps(data, indent=1) + "\n")
    print(table(results))
    for (case, room), choice in on_this_device().step_choices.items():
        print(f"steps of up to {room} rows of {case}: {choice.backend} {choice.reason or ''}")


if __name__ == "__main__":
    main()
