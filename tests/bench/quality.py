"""Print what our schemes and the published ones cost in quality and in bytes, on the demo model and real text.

`make bench-quality` runs it; `make bench-quality ARGS=--small` takes minutes. Decode-time KL divergence
against mlx-lm's own cache on Wikipedia articles and on the copy test, 1,536 prompt tokens a window, 128
scored. Rivals run as shipped, and once more with the same sinks and tail as ours. `--draws N` measures whatever
is rotated under N draws of the rotation's signs, and pools them: on the copy test a draw does more than a bit (ADR 13).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import corpus
import mlx.core as mx
import mlx_lm
import numpy as np
from rivals import RIVALS, SINK_TOKENS, TAIL_TOKENS, Rival

from daemon import paths
from daemon.cache import build
from daemon.config.evaluation import Contender
from daemon.config.locate import Located, fingerprint
from daemon.errors import TqdError
from daemon.kernels import rotation
from daemon.kernels.backend import backend_of_device
from daemon.measure import demo_model, divergence, evaluation, footprint, plots
from daemon.measure.divergence import Divergence, Pack, Scores, Window
from daemon.measure.evaluation import Subject
from daemon.measure.texts import Passage
from daemon.policy.request import request
from daemon.policy.schemes import UnknownSchemeError, parse_scheme
from daemon.policy.spec import KvSpec
from daemon.policy.store import load_policies

PROMPT, SCORE = 1536, 128
FIRST, BETWEEN, AGAIN = 512, 992, 160  # of the copy test: A[:512] + B[:992] + A[160:289]
GROUP = 3  # windows decoded together

SCHEMES = (
    "turbo8v8", "turbo8v4", "turbo8v3", "turbo5v4", "turbo4v4", "turbo4v3", "turbo3.5v3.5", "turbo4v3t", "turbo3tv3t", "turbo3v3",
    "turbo0v4",
)  # fmt: skip
SMALL_SCHEMES = ("turbo8v8", "turbo8v4", "turbo4v4", "turbo3v3")
SMALL_RIVALS = ("affine8", "turbo8v3 (mlx-swift)", "affine4")


@dataclass(frozen=True)
class Entrant:
    """One row of the table, and what packs its caches."""

    name: str
    group: str
    bits: float
    pack: Pack
    rotated: bool = True


def main() -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--draws", type=int, help="draws of the signs; without it the one in use")
    parser.add_argument("--small", action="store_true", help="one window, few schemes")
    parser.add_argument("--schemes", nargs="+", help="ours to measure")
    parser.add_argument("--rivals", nargs="*", help="rivals to measure, by name; none for none")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw them here, .png or .svg")
    arguments = parser.parse_args()
    try:
        if arguments.plot:
            plots.require(arguments.plot)
    except TqdError as error:
        parser.error(str(error))
    count = 1 if arguments.small else arguments.windows
    draws = range(1, arguments.draws + 1) if arguments.draws else (rotation.SEED_VERSION,)

    folder = demo_model.make(paths.cache_dir(), say=_say)
    subject = evaluation.load(
        folder,
        fingerprint=fingerprint(Located(folder)),
        profiles=paths.cache_dir() / "profiles",
    )
    natural, copies = passages(subject.tokenizer, count)
    entrants = _entrants(subject, arguments, natural[0])
    results = {
        name: _measure(subject.model, members, entrants, draws, name)
        for name, members in (("natural", natural), ("copy", copies))
    }
    rows = [
        {
            "name": entrant.name,
            "group": entrant.group,
            "cold_bits": entrant.bits,
            "natural": asdict(results["natural"][index]),
            "copy": asdict(results["copy"][index]),
        }
        for index, entrant in enumerate(entrants)
    ]
    print(table(rows))
    print(
        f"\n{folder.name}, {count} window{'s' * (count > 1)} of Wikipedia text, {SCORE} positions each, {_of(draws)}; ours with {SINK_TOKENS} sinks, "
        f"tail {TAIL_TOKENS}; bits of a packed value, sinks and tail not counted; mlx {mx.__version__}, "
        f"mlx-lm {mlx_lm.__version__}, {mx.default_device()}, {platform.machine()} {platform.system()}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    if arguments.plot:
        _plot(arguments.plot, rows)
    return 0


def packing_of(subject: Subject, scheme: str) -> Pack:
    """Return what packs caches under the policy that a server with `mode: scheme` has, calibrated like it."""
    kv = request(KvSpec(mode=scheme), load_policies().policies)
    entrant = evaluation.enter(subject, Contender(label=scheme, kv=kv), lambda text, _: None)
    _say(f"{scheme}: key calibration: {entrant.calibration}")
    return entrant.factory.packed


def passages(tokenizer: Any, count: int) -> tuple[list[Passage], list[Passage]]:
    """Return *count* windows of natural text and of the copy test, an article each."""
    articles = corpus.articles(paths.cache_dir() / "corpus")
    tokens = [tokenizer.encode(text) for text in articles[: count + 1]]
    natural = [Passage(tuple(article[: PROMPT + SCORE]), SCORE) for article in tokens[:count]]
    copies = [
        Passage((*a[:FIRST], *b[:BETWEEN], *a[AGAIN : AGAIN + SCORE + 1]), SCORE)
        for a, b in pairwise(tokens)
    ]
    return natural, copies


def _entrants(subject: Subject, arguments: argparse.Namespace, sample: Passage) -> list[Entrant]:
    small = Passage(sample.tokens[:64], 1)
    caches = divergence.prefill(subject.model, small).caches
    names = arguments.schemes or (SMALL_SCHEMES if arguments.small else _available(SCHEMES))
    ours = []
    for name in names:
        pack = packing_of(subject, name)
        bits = footprint.footprint(pack(caches), ()).bits_per_value
        ours.append(Entrant(name, "ours", bits, pack))
    wanted = arguments.rivals
    if wanted is None:
        wanted = SMALL_RIVALS if arguments.small else [rival.name for rival in RIVALS]
    head_dim = caches[0].keys.shape[-1]
    chosen = [rival for rival in RIVALS if rival.name in wanted]
    return ours + [
        Entrant(
            rival.name,
            "with the same sinks and tail" if with_tail else "as published",
            rival.mean_bits(head_dim, len(caches)),
            _rival_caches(rival, len(caches), with_tail=with_tail),
            rival.rotated,
        )
        for with_tail in (False, True)
        for rival in chosen
    ]


def _rival_caches(rival: Rival, n_layers: int, *, with_tail: bool) -> Pack:
    return lambda caches: build.convert(
        caches, lambda layer: rival.row(layer, n_layers, with_tail=with_tail)
    )


def _available(names: Sequence[str]) -> list[str]:
    """Return those of *names* that this build has."""
    found = []
    for name in names:
        try:
            parse_scheme(name)
        except UnknownSchemeError as error:
            _say(f"left out: {error}")
        else:
            found.append(name)
    return found


def _of(draws: Sequence[int]) -> str:
    return f"{len(draws)} draws of the signs" if len(draws) > 1 else f"draw {draws[0]} of the signs"


@contextmanager
def _signs(draw: int) -> Iterator[None]:
    """Rotate by the signs of *draw* meanwhile."""
    used = rotation.SEED_VERSION
    if draw == used:
        yield
        return
    if backend_of_device() == "cuda":
        raise SystemExit(
            "draws are compared on a CPU: CUDA's kernels keep the signs they began with"
        )
    _use(draw)
    try:
        yield
    finally:
        _use(used)


def _use(draw: int) -> None:
    rotation.SEED_VERSION = draw
    rotation.signs.cache_clear()
    rotation.matrix.cache_clear()
    rotation.basis.cache_clear()


def _measure(
    model: Any,
    members: Sequence[Passage],
    entrants: Sequence[Entrant],
    draws: Sequence[int],
    text: str,
) -> list[Divergence]:
    parts: list[list[Scores]] = [[] for _ in entrants]
    for start in range(0, len(members), GROUP):
        windows: list[Window] = []
        for passage in members[start : start + GROUP]:
            windows.append(divergence.prefill(model, passage))
        targets = [window.tokens[1:] for window in windows]
        reference = divergence.decode(model, windows, divergence.exact)
        for index, entrant in enumerate(entrants):
            started = time.monotonic()
            drawn = []
            for draw in draws if entrant.rotated else draws[:1]:
                with _signs(draw):
                    got = divergence.decode(model, windows, entrant.pack)
                drawn.append(divergence.compare(reference, got, targets))
            parts[index].append(_pooled(drawn))
            mean = parts[index][-1].kl.mean()
            _say(
                f"{text}, windows {start + 1}-{start + len(windows)}: {entrant.name} ({entrant.group}): "
                f"KLD {mean:.5f} ({time.monotonic() - started:.0f} s)"
            )
    return [divergence.summarize(divergence.join(part)) for part in parts]


def _pooled(drawn: Sequence[Scores]) -> Scores:
    """Return the scores of all draws as positions of the same windows: only windows are independent."""
    names = [field.name for field in fields(Scores)]
    return Scores(
        *(np.concatenate([getattr(each, name) for each in drawn], axis=1) for name in names)
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table, one block for each group."""
    lines = [
        "| scheme | bits per value | against 16 bits | KLD mean ± se | median | 99.9 % | top-1 | PPL | copy test KLD ± se | copy top-1 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            lines.append(f"| **{group}** | | | | | | | | | |")
        natural, copies = row["natural"], row["copy"]
        delta = natural["perplexity"] / natural["reference_perplexity"] - 1
        lines.append(
            f"| {row['name']} | {row['cold_bits']:.2f} | {16 / row['cold_bits']:.2f}× "
            f"| {_mean(natural)} | {natural['median']:.5f} | {natural['p999']:.3f} "
            f"| {100 * natural['top1_agreement']:.1f} % | {100 * delta:+.2f} % "
            f"| {_mean(copies)} | {100 * copies['top1_agreement']:.1f} % |"
        )
    return "\n".join(lines)


def _mean(figures: dict[str, Any]) -> str:
    error = figures["standard_error"]
    return f"{figures['mean']:.5f}" + ("" if error is None else f" ± {error:.5f}")


def _plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    points = [
        plots.Point(row["name"], row["cold_bits"], row["natural"]["mean"], row["group"])
        for row in rows
    ]
    plots.draw(path, points, (), (), title="SmolLM2-135M-Instruct, natural text")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
