"""What `tqd doctor --bench` found out about this device's kernels, as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from daemon.cli.tables import console


def healthy(report: Mapping[str, Any]) -> bool:
    """Whether no kernel of *report*, the result of the task `kernels`, failed its comparison."""
    return not any(each["failed"] for each in report["agreements"])


def print_kernels(report: Mapping[str, Any]) -> None:
    """Print the result of the task `kernels`."""
    out = console()
    agreements = report["agreements"]
    own = [each for each in agreements if each["backend"] != "reference"]
    out.print(
        Text(
            f"{report['device']}, mlx {report['mlx']}: kernels of this device run {len(own)} of"
            f" {len(agreements)} cases, the portable reference the others"
        )
    )
    for each in agreements:
        if each["failed"]:
            out.print(Text(f"failed: {each['case']}: {each['reason']}", style="red"))
    why = dict.fromkeys(
        each["reason"] for each in agreements if each["reason"] and not each["failed"]
    )
    for reason in why:
        out.print(Text(f"reference: {reason}", style="dim"))
    table = Table(box=None, pad_edge=False)
    for name in ("SCHEME", "TOKENS", "PACKED", "16 BITS", "TIMES FASTER"):
        table.add_column(name, justify="left" if name == "SCHEME" else "right")
    for timing in report["timings"]:
        table.add_row(
            timing["scheme"],
            f"{timing['tokens']:,}",
            f"{timing['packed_us']:,.0f} µs",
            f"{timing['plain_us']:,.0f} µs",
            f"{timing['ratio']:.2f}",
        )
    out.print()
    out.print(table)
    out.print(
        Text("one layer of an 8B llama, one new token, beside MLX's own attention", style="dim")
    )
