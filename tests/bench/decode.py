"""Print how fast this machine decodes with each KV cache, and what the caches weigh.

`make bench-decode` takes the demo model, and then a stack of four layers with 8 KV heads of 128 values
(Qwen3-0.6B's shape, random weights). Caches are filled with random keys and values, ours calibrated
like a server's, and take turns step by step: a turn is one token with each of them, so that whatever
else the machine does falls on all alike. Figures are medians, as ratios to mlx-lm's own cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

from daemon import paths
from daemon.cache import build, seam
from daemon.cache.row import Row
from daemon.kernels.attention import on_this_device
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.measure import demo_model
from daemon.policy.schemes import parse_scheme

SINK_TOKENS, TAIL_TOKENS = 4, 32
STOCK, EXACT = "mlx-lm", "fp16"
STOCK_QUANTIZED = {"mlx-lm 8 bits": 8, "mlx-lm 4 bits": 4}
SCHEMES = ("int8", "turbo8v4", "turbo4v4", "turbo3v3")
CONTEXTS = (512, 2048, 8192)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Caches = list[Any]


@dataclass(frozen=True)
class Figure:
    """What one cache cost at one length."""

    model: str
    context: int
    cache: str
    step_ms: float
    speed: float
    """Tokens a second, in units of mlx-lm's own cache: the median over turns."""
    cache_bytes: int


def main() -> int:
    """Measure and print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="cpu: of all threads, on a machine that others use",
    )
    parser.add_argument("--plain-keys", action="store_true", help="ours without calibration")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    seam.install()
    figures: list[Figure] = []
    for name in arguments.models:
        model = MODELS[name]()
        for context in arguments.contexts:
            figures += measure(model, name, context, arguments)
            _say(f"{name}, {context} tokens: done")
        print(table([figure for figure in figures if figure.model == name]))
    print(
        "\ndemo: SmolLM2-135M, 30 layers, 9 query heads on 3 KV heads of 64 values; stack: 4 layers, 16 on 8 of 128"
    )
    print(
        f"mlx {mx.__version__}, mlx-lm {mlx_lm.__version__}, {mx.default_device()}, {platform.machine()} {platform.system()}, "
        f"{arguments.turns} turns, {arguments.clock} clock; ours with {SINK_TOKENS} sinks and a tail of {TAIL_TOKENS}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2))
    return 0


def measure(model: Any, name: str, context: int, arguments: argparse.Namespace) -> list[Figure]:
    """Return the figures of every cache of *model* with *context* tokens in it."""
    filled = _filled(model, context)
    transforms = {} if arguments.plain_keys else key_transforms(model)
    caches = {STOCK: filled}
    for label, bits in STOCK_QUANTIZED.items():
        caches[label] = [cache.to_quantized(group_size=64, bits=bits) for cache in filled]
    for scheme in (EXACT, *arguments.schemes):
        caches[scheme] = ours(filled, scheme, transforms)
    mx.eval([cache.state for made in caches.values() for cache in made])
    sizes = {label: sum(cache.nbytes for cache in made) for label, made in caches.items()}
    times = turns(model, caches, arguments.turns, CLOCKS[arguments.clock])
    return [
        Figure(
            model=name,
            context=context,
            cache=label,
            step_ms=1000 * statistics.median(times[label]),
            speed=statistics.median(
                stock / own for stock, own in zip(times[STOCK], times[label], strict=True)
            ),
            cache_bytes=sizes[label],
        )
        for label in caches
    ]


def turns(
    model: Any, caches: dict[str, Caches], count: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of one decode step with each of *caches*, *count* times, after two that do not count."""
    times: dict[str, list[float]] = {label: [] for label in caches}
    token = mx.array([[7]])
    for turn in range(count + 2):
        for label, made in caches.items():
            started = clock()
            mx.eval(model(token, cache=made))
            if turn >= 2:
                times[label].append(clock() - started)
    return times


def ours(filled: Sequence[KVCache], scheme: str, transforms: dict[int, KeyTransform]) -> Caches:
    """Return our caches with the tokens of *filled*, all packed but sinks and tail."""
    attention = on_this_device()

    def row(index: int) -> Row:
        return Row(
            parse_scheme(scheme),
            sink_tokens=SINK_TOKENS,
            tail_tokens=TAIL_TOKENS,
            keys=transforms.get(index),
            attention=attention,
        )

    return build.convert(filled, row)


def _filled(model: Any, context: int) -> list[KVCache]:
    """Return mlx-lm's own caches with *context* random tokens in them."""
    probe = make_prompt_cache(model)
    model(mx.array([[7]]), cache=probe)
    made = []
    for layer, cache in enumerate(probe):
        k_key, v_key = mx.random.split(mx.random.key(layer))
        _, heads, _, dim = cache.keys.shape
        full = KVCache()
        full.update_and_fetch(
            mx.random.normal((1, heads, context, dim), key=k_key).astype(cache.keys.dtype),
            mx.random.normal((1, heads, context, dim), key=v_key).astype(cache.values.dtype),
        )
        made.append(full)
    mx.eval([cache.state for cache in made])
    return made


def key_transforms(model: Any) -> dict[int, KeyTransform]:
    """Return key transforms with random statistics and the layers' own rotary embedding, which is the same in all."""
    transforms = {}
    heads, dim = _filled(model, 1)[0].keys.shape[1::2]
    rotary = Rotary(model.layers[0].self_attn.rope, dim)
    for layer in range(len(model.layers)):
        mean, scale = mx.random.normal((2, heads, dim), key=mx.random.key(layer))
        transforms[layer] = KeyTransform(mx.exp(0.2 * scale), mean, rotary)
    return transforms


def table(figures: Sequence[Figure]) -> str:
    """Return a Markdown table: a row for each cache, for each length its step, speed and bytes."""
    contexts = sorted({figure.context for figure in figures})
    labels = list(dict.fromkeys(figure.cache for figure in figures))
    by_place = {(figure.cache, figure.context): figure for figure in figures}
    head = " | ".join(f"{context:,}: ms | speed | MB" for context in contexts)
    lines = [
        f"\n{figures[0].model}\n",
        f"| cache | {head} |",
        "|---" * (3 * len(contexts) + 1) + "|",
    ]
    for label in labels:
        cells = [
            f"{figure.step_ms:.1f} | {figure.speed:.2f}× | {figure.cache_bytes / 1e6:.1f}"
            for context in contexts
            for figure in (by_place[label, context],)
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _demo() -> Any:
    folder = demo_model.make(paths.cache_dir(), say=_say)
    model, _ = mlx_lm.load(str(folder))
    return model


def _stack() -> Any:
    mx.random.seed(3)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, vocab_size=1024, rope_theta=1e6, tie_word_embeddings=True,
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "demo": _demo,
    "stack": _stack,
}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
