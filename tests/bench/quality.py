"""Print what each scheme costs in quality and in bytes, on the demo model and real text.

`make bench-quality` runs it. Decode-time KL divergence against the unpacked cache, 1,536 prompt tokens
a window, 128 scored; bytes from real buffers.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import corpus
import mlx.core as mx
import mlx_lm

from daemon import paths
from daemon.cache import seam
from daemon.cache.row import Row
from daemon.measure import demo_model, divergence
from daemon.policy.schemes import parse_scheme

PROMPT, SCORE = 1536, 128
SCHEMES = ("int8", "turbo0v4", "turbo0v3", "turbo8v4", "turbo8v3", "turbo4v4")
SINK_TOKENS, TAIL_TOKENS = 4, 32


def main() -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    seam.install()
    folder = demo_model.make(paths.cache_dir(), say=_say)
    model, tokenizer = mlx_lm.load(str(folder))
    windows = []
    for index, text in enumerate(
        corpus.articles(paths.cache_dir() / "corpus")[: arguments.windows]
    ):
        _say(f"prefill {index + 1}/{arguments.windows}")
        tokens = tokenizer.encode(text)
        windows.append(divergence.prefill(model, tokens, prompt=PROMPT, score=SCORE))
    _say("reference")
    reference = divergence.decode(model, windows, _row("fp16"))
    rows = []
    for scheme in arguments.schemes:
        started = time.monotonic()
        got = divergence.compare(reference, divergence.decode(model, windows, _row(scheme)))
        bits = _cold_bits(scheme, windows[0])
        rows.append(
            {
                "scheme": scheme,
                "cold_bits": bits,
                "standard_error": got.standard_error,
                **asdict(got),
            }
        )
        _say(f"{scheme}: KLD {got.mean:.5f} ({time.monotonic() - started:.0f} s)")
    print(_table(rows))
    print(
        f"\n{folder.name}, {rows[0]['positions']} positions of Wikipedia text, {SINK_TOKENS} sinks, tail {TAIL_TOKENS}; "
        f"mlx {mx.__version__}, mlx-lm {mlx_lm.__version__}, {mx.default_device()}, {platform.machine()} {platform.system()}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    return 0


def _row(scheme: str) -> divergence.MakeRow:
    return lambda _: Row(parse_scheme(scheme), sink_tokens=SINK_TOKENS, tail_tokens=TAIL_TOKENS)


def _cold_bits(scheme: str, window: divergence.Window) -> float:
    """Return the bits of a packed value, measured as the growth of real buffers over 1,024 tokens."""
    keys, values = window.caches[0].keys_and_values()
    row = Row(parse_scheme(scheme), sink_tokens=SINK_TOKENS, tail_tokens=TAIL_TOKENS)
    used = []
    for start in (0, 512):
        row.append(keys[0, :, start : start + 512], values[0, :, start : start + 512])
        row.pack()
        used.append((row.used_bytes, row.packed_tokens))
    (bytes_before, tokens_before), (bytes_after, tokens_after) = used
    per_token = keys.shape[1] * (keys.shape[-1] + values.shape[-1])
    bits = 8 * (bytes_after - bytes_before) / (tokens_after - tokens_before) / per_token
    if keys.itemsize != 2 and "0v" in scheme:  # keys as the model computes: count them as 16 bits
        bits -= (keys.itemsize - 2) * 8 * keys.shape[-1] / (keys.shape[-1] + values.shape[-1])
    return bits


def _table(rows: Sequence[dict[str, float]]) -> str:
    lines = [
        "| scheme | bits per value | against 16 bits | KLD mean ± se | median | 99.9 % | top-1 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['scheme']} | {row['cold_bits']:.2f} | {16 / row['cold_bits']:.2f}× | {row['mean']:.5f} ± {row['standard_error']:.5f} "
        f"| {row['median']:.5f} | {row['p999']:.3f} | {100 * row['top1_agreement']:.1f} % |"
        for row in rows
    ]
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
