"""Print what reading a long prompt costs with each KV cache on this machine: tokens a second, and memory at its peak.

`make bench-prefill` takes the demo model and reads the prompt in chunks of 128 tokens, as a worker does
on a CPU. The peak does not count the weights.
"""

from __future__ import annotations

import argparse
import platform
import sys

import mlx.core as mx
import mlx_lm
from decode import CLOCKS, EXACT, SCHEMES, SINK_TOKENS, STOCK, TAIL_TOKENS, key_transforms
from mlx_lm.models.cache import make_prompt_cache

from daemon import paths
from daemon.cache import seam
from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.kernels.attention import on_this_device
from daemon.measure import demo_model
from daemon.policy.schemes import parse_scheme

CHUNK = 128


def main() -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    arguments = parser.parse_args()

    seam.install()
    folder = demo_model.make(paths.cache_dir(), say=lambda text: print(text, file=sys.stderr))
    model, _ = mlx_lm.load(str(folder))
    transforms, attention = key_transforms(model), on_this_device()
    caches = {STOCK: make_prompt_cache(model)}
    for scheme in (EXACT, *arguments.schemes):
        caches[scheme] = [
            SequenceCache(
                Row(
                    parse_scheme(scheme),
                    sink_tokens=SINK_TOKENS,
                    tail_tokens=TAIL_TOKENS,
                    keys=transforms[layer],
                    attention=attention,
                )
            )
            for layer in range(len(model.layers))
        ]
    print("| cache | tokens/s | peak MB |\n|---|---|---|")
    for label in list(caches):
        made = caches.pop(label)  # so that it is gone before the next one
        seconds, peak = read(model, made, arguments.tokens, arguments.clock)
        print(f"| {label} | {arguments.tokens / seconds:.0f} | {peak / 1e6:.0f} |", flush=True)
    print(
        f"\n{folder.name}, {arguments.tokens} tokens, {arguments.clock} clock, mlx {mx.__version__}, mlx-lm {mlx_lm.__version__}, "
        f"{mx.default_device()}, {platform.machine()} {platform.system()}"
    )
    return 0


def read(model: object, caches: list[object], tokens: int, clock: str) -> tuple[float, int]:
    """Return the seconds that reading *tokens* takes, and the bytes that it needs at most."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    now = CLOCKS[clock]
    started = now()
    for at in range(0, tokens, CHUNK):
        model((mx.arange(at, at + CHUNK) * 7919 % 40_000)[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    return now() - started, mx.get_peak_memory() - before


if __name__ == "__main__":
    sys.exit(main())
