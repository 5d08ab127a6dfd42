"""What `tqd doctor --bench` found out about this device's kernels, as people read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from daemon.cli.tables import console


def healthy(report: Mapping[str, Any]) -> bool:
    """Whether no kernel of *report*, the result of the task `kernels`, failed its comparison."""
    return not any(each["failed"] for each in (*report["agreements"], *report["packing"]))


def print_kernels(report: Mapping[str, Any]) -> None:
    """Print the result of the task `kernels`."""
    out = console()
    attention, packing = report["agreements"], report["packing"]
    out.print(
        Text(
            f"{report['device']}, mlx {report['mlx']}: kernels of this device attend in {_share(attention)} cases"
            f" and pack {_share(packing)} layouts, the portable reference does the others"
        )
    )
    agreements = [*attention, *packing]
    for each in agreements:
        if each["failed"]:
            out.print(Text(f"failed: {each['case']}: {each['reason']}", style="red"))
    why = dict.fromkeys(
        each["reason"] for each in agreements if each["reason"] and not each["failed"]
    )
    for reason in why:
        out.print(Text(f"reference: {reason}", style="dim"))
    table = Table(box=None, pad_edge=False)
    for name in ("SCHEME", "TOKENS", "PACKED", "PLAIN", "TIMES FASTER"):
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
        Text(
            "one layer of an 8B llama, one new token, beside MLX's own attention in float16 (float32 on a CPU)",
            style="dim",
        )
    )


def _share(agreements: Sequence[Mapping[str, Any]]) -> str:
    own = [each for each in agreements if each["backend"] != "reference"]
    return f"{len(own)} of {len(agreements)}"
