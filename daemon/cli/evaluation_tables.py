"""Evaluations and advice as people read them on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from daemon.cli.tables import console
from daemon.config.evaluation import EvalReport, Figures, Needle, PolicyFigures
from daemon.policy.advise import Advice, Advised
from daemon.units import format_size


def print_report(report: EvalReport) -> None:
    """Print what `tqd eval` measured."""
    out = console()
    out.print(Text.assemble((report.model, "bold"), f"  {report.text}"))
    out.print(_figures(report))
    out.print(_speeds(report))
    for policy in report.policies:
        out.print(
            Text(
                f"{policy.label}: {policy.summary}; {policy.sink_tokens} sinks, tail {policy.tail_tokens};"
                f" key calibration: {policy.calibration}",
                style="dim",
            )
        )
        for layer in policy.layers:
            if layer.reason and layer.requested != layer.effective:
                span = f"layers {layer.first}-{layer.last}"
                out.print(Text(f"  {span}: {layer.effective}, {layer.reason}", style="yellow"))
        for warning in policy.warnings:
            out.print(Text(f"  note: {warning}", style="yellow"))
    fp16 = report.policies[0].natural.reference_perplexity
    out.print(
        Text(
            f"against the fp16 cache: perplexity {fp16:.2f}, needles {_needles(report.reference_needles)}; "
            f"{report.windows} window{'s' * (report.windows > 1)} of {report.prompt_tokens:,} prompt tokens, {report.scored_tokens} scored; "
            f"{', '.join(f'{name} {version}' for name, version in report.versions.items())}, {report.device}",
            style="dim",
        )
    )


def _figures(report: EvalReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("policy", no_wrap=True)
    for column in ("bits/value", "B/token", "KLD mean", "median", "99.9 %", "top-1", "PPL"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("copy KLD", "copy top-1", "needles"):
        table.add_column(column, justify="right", no_wrap=True)
    for policy in report.policies:
        table.add_row(*_row(policy))
    return table


def _speeds(report: EvalReport) -> Table:
    """Return tokens per second through the server's own scheduler, and whether a batch changes any."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("served", no_wrap=True)
    together = report.reference_served.sequences
    for column in ("prompt tok/s", "decode tok/s", f"{together} at once tok/s", "as if alone"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [("fp16 cache", report.reference_served)]
    for label, served in rows + [(policy.label, policy.served) for policy in report.policies]:
        table.add_row(
            label,
            f"{served.prompt_tps:.0f}",
            f"{served.decode_tps:.1f}",
            f"{served.batch_decode_tps:.1f}",
            f"{served.same_as_alone}/{served.sequences}",
        )
    return table


def _row(policy: PolicyFigures) -> tuple[str, ...]:
    natural, copies = policy.natural, policy.copy_test
    return (
        policy.label,
        f"{policy.bits_per_value:.2f}",
        f"{policy.bytes_per_token:,.0f}",
        _mean(natural),
        f"{natural.kld_median:.5f}",
        f"{natural.kld_p999:.3f}",
        f"{natural.top1_agreement:.1%}",
        f"{natural.perplexity_delta:+.2%}",
        _mean(copies),
        f"{copies.top1_agreement:.1%}",
        _needles(policy.needles),
    )


def _mean(figures: Figures) -> str:
    error = figures.kld_standard_error
    return f"{figures.kld_mean:.5f}" + ("" if error is None else f" ± {error:.5f}")


def _needles(needles: Sequence[Needle]) -> str:
    """Return how many were found, read at once and continuing a cached prefix."""
    fresh, continued = (
        sum(needle.fresh for needle in needles),
        sum(needle.continued for needle in needles),
    )
    return f"{fresh}/{len(needles)} fresh, {continued}/{len(needles)} continued"


def print_advice(model: str, advised: Advised) -> None:
    """Print what `tqd advise` suggests."""
    out = console()
    dims = ", ".join(map(str, advised.head_dims)) or "none"
    out.print(
        Text.assemble(
            (model, "bold"),
            f"  {advised.model_type}: {advised.attention} attention, {advised.growing_layers} of"
            f" {advised.layers} layers grow with the context, head_dim {dims}",
        )
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in (
        "context",
        "suggestion",
        "in servers.yaml",
        "one sequence",
        "also measure",
        "why",
    ):
        table.add_column(column, overflow="fold", no_wrap=column == "context")
    for row in advised.rows:
        table.add_row(*_advice(row))
    out.print(table)
    for note in advised.notes:
        out.print(Text(f"note: {note}", style="yellow"))
    out.print(
        Text(
            "advice from config.json by published rules; nothing changes by itself, and"
            " `tqd eval` measures what a policy costs",
            style="dim",
        )
    )


def _advice(row: Advice) -> tuple[str, ...]:
    exact, suggest = row.exact.kv_bytes, row.suggest.kv_bytes
    size = format_size(suggest)
    if suggest < exact:
        size += f" instead of {format_size(exact)}"
    return (
        row.label,
        row.suggest.scheme,
        f"kv: {{{row.suggest.write}}}",
        f"{size} at {row.context_tokens:,}",
        ", ".join(choice.scheme for choice in row.also) or "-",
        row.reason,
    )
