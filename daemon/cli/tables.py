"""Reports as people read them on a terminal; nothing here decides anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from daemon.units import format_size

if TYPE_CHECKING:  # reading a configuration is slow to import, and `tqd status` needs none of it
    from daemon.cli.report import MemoryReport, Report, ServerReport
    from daemon.policy.claim import Claim
    from daemon.policy.resolved import LayerGroup

_PIPED_WIDTH = 200  # columns where no terminal says its own
_STYLES = {
    "ok": "green",
    "disabled": "dim",
    "unresolved": "red",
    "no weights": "yellow",
    "blocked": "red",
}


def console() -> Console:
    """Return the console for standard output; names from a file are never read as markup."""
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def ratio(compression: float) -> str:
    """Return how a size compares with another that is *compression* times it, ready for that other's name."""
    if f"{compression:.2f}" == "1.00":
        return "as large as"
    if compression > 1:
        return f"{compression:.2f}x smaller than"
    return f"{1 / compression:.2f}x larger than"


def print_report(report: Report) -> None:
    """Print what `tqd check` found."""
    out = console()
    for server in report.servers:
        for part in _server(server):
            out.print(part)
        out.print()
    if report.memory.needs_bytes or report.memory.unknown:
        for part in _memory(report.memory):
            out.print(part)
    for warning in report.warnings:
        out.print(Text(f"warning: {warning}", style="yellow"))


def _server(server: ServerReport) -> Iterator[RenderableType]:
    title = Text.assemble(
        (server.name, "bold"),
        f"  {server.model}  {server.endpoint}  ",
        (server.state, _STYLES[server.state]),
    )
    yield title
    if server.reason:
        yield _line(server.reason, _STYLES[server.state])
    if server.hint:
        yield _line(f"hint: {server.hint}", "dim")
    if server.summary is not None:
        yield _line(f"policy {server.policy}: {server.summary}")
        yield Padding(_layers(server.layers), (0, 0, 0, 2), expand=False)
        yield _line(_sizes(server))
        if server.claim is not None:
            yield _line(_plan(server, server.claim))
    for warning in server.warnings:
        yield _line(f"note: {warning}", "yellow")


def _layers(groups: tuple[LayerGroup, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("layers", "kind", "requested", "effective", "reason"):
        table.add_column(column, overflow="fold")
    for group in groups:
        span = f"{group.first}" if group.first == group.last else f"{group.first}-{group.last}"
        differs = group.requested != group.effective
        table.add_row(
            span,
            str(group.kind),
            group.requested,
            Text(group.effective, style="yellow" if differs else ""),
            group.reason or "",
        )
    return table


def _sizes(server: ServerReport) -> str:
    parts = []
    if server.bytes_per_token and server.bytes_per_token_fp16:
        parts.append(
            f"{format_size(server.bytes_per_token)} per token ({ratio(server.compression or 1.0)} "
            f"{format_size(server.bytes_per_token_fp16)} at 16 bits)"
        )
    else:
        parts.append("nothing grows with the context")
    if server.kv_bytes is not None:
        shape = f"{server.max_context:,} tokens x {server.max_concurrent} sequences"
        parts.append(f"KV {format_size(server.kv_bytes)} at {shape}")
    parts.append(f"weights {_size(server.weights_bytes)}")
    return "; ".join(parts)


def _plan(server: ServerReport, claim: Claim) -> str:
    """Return what the server needs of the machine's memory, and what it gets."""
    if server.share_bytes is not None:
        gets = f"gets {format_size(server.share_bytes)} of the {format_size(claim.wants_bytes)} that it could use"
    elif server.state == "disabled":
        gets = "not planned for"
    else:
        gets = "does not fit beside the servers before it"
    from daemon.supervisor.memory import words  # reads what `tqd status` needs nothing of

    return f"memory: needs {format_size(claim.needs_bytes)} ({words(claim)}); {gets}"


def _memory(memory: MemoryReport) -> Iterator[Text]:
    share = (
        f"{memory.budget_bytes / memory.machine_bytes:.0%} of {format_size(memory.machine_bytes)}"
    )
    budget = f"{format_size(memory.budget_bytes)} ({share})"
    needed = f"{format_size(memory.needs_bytes)} needed of {budget}"
    match memory.fits:
        case "yes" if memory.unknown:
            yield Text(f"together, as far as known: {needed}")
        case "yes":
            yield Text(f"together: {needed}: fits", style="green")
        case "not all at once":
            yield Text(
                f"together: {needed}: fits; every sequence at its longest at once would take"
                f" {format_size(memory.wants_bytes)}, so some requests may wait",
                style="yellow",
            )
        case "no":
            yield Text(f"together: {needed}: does not fit", style="red")
    if memory.unknown:
        yield Text(f"not counted, weights not here: {', '.join(memory.unknown)}", style="yellow")


def _size(count: int | None) -> str:
    return "not here" if count is None else format_size(count)


def _line(text: str, style: str = "") -> Padding:
    return Padding(Text(text, style=style), (0, 0, 0, 2), expand=False)
