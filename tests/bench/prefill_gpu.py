"""Speed and memory of reading a prompt with an 8B-shaped llama of random weights on one GPU: our caches against mlx-lm's own, in one run.

    python tests/bench/prefill_gpu.py [--tokens 8192 32768] [--layers 32]

Prompts are read in a server's chunks. The peak does not count the weights, which have 16 bits. The first
prompt of each cache is short and not counted: it is what MLX compiles at.
"""

from __future__ import annotations

import argparse
import time

import mlx.core as mx
from decode_gpu import KINDS, LAYERS, about_machine, make_model
from mlx_lm.models import llama

from daemon.policy.claim import PREFILL_CHUNK

CHUNK = PREFILL_CHUNK["cuda"]
CACHES = ("mlx-lm fp16", "turbo8v4 + mean", "turbo4v4 + mean", "turbo4v4")


def read(model: llama.Model, kind: str, tokens: int) -> tuple[float, int, int]:
    """Return the seconds that a prompt takes, the bytes that it needs at most, and those of its caches."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches = KINDS[kind]([0], model)
    started = time.perf_counter()
    for at in range(0, tokens, CHUNK):
        prompt = mx.arange(at, min(at + CHUNK, tokens)) * 7919 % 100_000
        model(prompt[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    seconds = time.perf_counter() - started
    return seconds, mx.get_peak_memory() - before, sum(cache.nbytes for cache in caches)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--kinds", nargs="+", default=list(CACHES), choices=list(KINDS))
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    print(about_machine() | {"layers": str(options.layers), "chunk": str(CHUNK)})
    model = make_model(options.layers, 16)
    print("| tokens | cache | tokens/s | × fp16 | peak GB | caches GB |\n|---|---|---|---|---|---|")
    for kind in options.kinds:
        read(model, kind, 2 * CHUNK)
    for tokens in options.tokens:
        first = None
        for kind in options.kinds:
            seconds, peak, size = read(model, kind, tokens)
            first = first or seconds
            print(
                f"| {tokens:,} | {kind} | {tokens / seconds:,.0f} | {first / seconds:.2f} | {peak / 1e9:.2f} | {size / 1e9:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
