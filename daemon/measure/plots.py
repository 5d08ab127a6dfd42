"""Plots of an evaluation as PNG or SVG; matplotlib is an optional extra, and the rest works without it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.config.evaluation import EvalReport
from daemon.errors import TqdError

FORMATS = (".png", ".svg")

_NOISE = 1e-7  # nats: below this a divergence is rounding, and a logarithmic axis needs a number


@dataclass(frozen=True, slots=True)
class Point:
    """One scheme: its bits per value, and its mean divergence in nats."""

    label: str
    bits: float
    kld: float
    group: str = "natural text"


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes of one sequence at each length of context."""

    label: str
    context_bytes: tuple[int, ...]


def require(path: Path) -> None:
    """Refuse a plot that cannot be made, before anything is measured.

    Raises:
        TqdError: the name's ending is no format, its folder is missing, or matplotlib is.
    """
    if path.suffix.lower() not in FORMATS:
        raise TqdError(
            f"{path.name} names no format of a plot", hint=f"end it in {' or '.join(FORMATS)}"
        )
    if not path.parent.is_dir():
        raise TqdError(f"there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise TqdError(f"nothing can be written to {path.parent}")
    _matplotlib()


def draw_report(path: Path, report: EvalReport) -> None:
    """Write what *report* says as *path*."""
    points = [
        Point(policy.label, policy.bits_per_value, figures.kld_mean, group)
        for policy in report.policies
        for group, figures in (("natural text", policy.natural), ("copy test", policy.copy_test))
    ]
    curves = [Curve("fp16", report.context_bytes_fp16)]
    curves += [Curve(policy.label, policy.context_bytes) for policy in report.policies]
    draw(path, points, curves, report.contexts, title=f"{Path(report.model).name}: {report.text}")


def draw(
    path: Path,
    points: Sequence[Point],
    curves: Sequence[Curve],
    contexts: Sequence[int],
    *,
    title: str,
) -> None:
    """Write *path*: divergence against bits per value and, where there are *curves*, bytes against context."""
    figure_class = _matplotlib()
    panels = 2 if curves else 1
    figure = figure_class(figsize=(7.5 * panels, 5.5), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _divergence(axes[0], points)
    if curves:
        _bytes(axes[1], curves, contexts)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _matplotlib() -> Any:
    """Return the class of figures that need no display: their canvas is Agg's, or SVG's when saved as one."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TqdError(
            "plots need matplotlib, which is not installed", hint="pip install 'tqd[plots]'"
        ) from error
    return Figure


def _divergence(axes: Any, points: Sequence[Point]) -> None:
    for group, marker in zip(dict.fromkeys(point.group for point in points), "os^D", strict=False):
        members = [point for point in points if point.group == group]
        axes.scatter(
            [point.bits for point in members],
            [max(point.kld, _NOISE) for point in members],
            marker=marker,
            label=group,
        )
    for point in points:
        axes.annotate(
            point.label,
            (point.bits, max(point.kld, _NOISE)),
            textcoords="offset points",
            xytext=(5, 4),
            fontsize=8,
        )
    axes.margins(x=0.15, y=0.1)  # room for the names
    axes.set_yscale("log")
    axes.set_xlabel("bits per value")
    axes.set_ylabel("mean KL divergence from the fp16 cache, nats")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()


def _bytes(axes: Any, curves: Sequence[Curve], contexts: Sequence[int]) -> None:
    for curve in curves:
        mebibytes = [count / 2**20 for count in curve.context_bytes]
        axes.plot(contexts, mebibytes, marker=".", label=curve.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{length:,}" for length in contexts], rotation=30)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("KV cache of one sequence, MiB")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
