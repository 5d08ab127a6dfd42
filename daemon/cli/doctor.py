"""`tqd doctor` and `tqd version`: is everything here as a worker needs it?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from daemon.cli import kernel_tables
from daemon.cli.findings import Finding, look_around
from daemon.cli.machine_findings import machine, versions
from daemon.cli.measuring import measure, progress
from daemon.cli.site_findings import site
from daemon.cli.tables import console
from daemon.supervisor.environment import inherited, mlx_environment, openblas

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings

_INDENT = " " * 17  # the width of the two columns before the text
_STYLES = {"ok": "green", "warn": "yellow", "problem": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a .tar.gz to send along with a question: findings, status, the ends of the logs, the"
    " configuration without its secrets.",
)
@click.option(
    "--bench",
    is_flag=True,
    help="Also compare the attention kernels of this device with the reference, and time them; takes minutes.",
)
@click.pass_obj
def doctor(settings: Settings, as_json: bool, bundle: Path | None, bench: bool) -> None:
    """Look at everything that keeps models from running here, in the place of a worker.

    Runs one operation of MLX in a process of its own, and changes nothing. Exit code 1 when there is a problem.
    """
    scene = look_around(settings.config, settings.state, named=settings.names_config)
    findings = chain(machine(scene), site(scene))
    found = list(findings if as_json else _shown(findings))
    kernels = _kernels() if bench else None
    well = _healthy(found) and (kernels is None or kernel_tables.healthy(kernels))
    if as_json:
        document = {"ok": well, "findings": [asdict(it) for it in found], "kernels": kernels}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    elif kernels is not None:
        click.echo()
        kernel_tables.print_kernels(kernels)
    if bundle is not None:
        from daemon.cli.bundle import write  # only here

        write(bundle, scene, found)
        click.echo(f"wrote {bundle}; look into it before you send it to anybody", err=True)
    if not well:
        sys.exit(1)


def _kernels() -> dict[str, Any]:
    environ = mlx_environment(inherited(), preload=openblas())
    with progress() as show:
        report: dict[str, Any] = measure(["kernels"], show, environ=environ)
    return report


def _healthy(found: Iterable[Finding]) -> bool:
    return all(it.verdict != "problem" for it in found)


def _shown(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Print each finding as soon as it is there, and pass it on."""
    out = console()
    for it in findings:
        verdict = Text(f"{it.verdict:<8}", style=_STYLES[it.verdict])
        text = it.text.replace("\n", f"\n{_INDENT}")
        out.print(Text.assemble(verdict, (f"{it.topic:<9}", "bold"), text), soft_wrap=True)
        if it.hint is not None:
            hint = it.hint.replace("\n", f"\n{_INDENT}")
            out.print(Text(f"{_INDENT}hint: {hint}", style="dim"), soft_wrap=True)
        yield it


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def version(as_json: bool) -> None:
    """Print the versions of tqd and of what it builds on."""
    found = versions()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for name, number in sorted(found.items(), key=lambda it: it[0] != "tqd"):
            click.echo(f"{name} {number}")


COMMANDS: tuple[click.Command, ...] = (doctor, version)
