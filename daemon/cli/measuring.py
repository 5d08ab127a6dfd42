"""Run a task of `python -m daemon.measure`, which may load MLX, and hear what it says."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from daemon.errors import TqdError

Heard = Callable[[str, float | None], None]
"""Told what is being done, and the share that is done where the task knows it."""


class MeasureError(TqdError):
    """The measuring process says why it cannot go on; carries the exit code that it chose."""

    def __init__(self, message: str, *, hint: str | None, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def measure(
    arguments: Sequence[str],
    heard: Heard,
    *,
    document: str | None = None,
    python: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Run the task *arguments*, with *document* on its stdin, and return its result.

    *python* is the interpreter, by default this one; *environ* the environment, by default this one's.

    Raises:
        MeasureError: the task failed, with its own words.
        TqdError: it ended without a word.
    """
    command = [python or sys.executable, "-P", "-m", "daemon.measure", *arguments]
    result: Any = None
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
    except OSError as error:
        raise TqdError(f"{command[0]} cannot be started: {error.strerror}") from error
    with process as child:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already; its exit code says more
            child.stdin.write(document or "")
            child.stdin.close()
        for line in child.stdout:
            said = json.loads(line)
            if "progress" in said:
                heard(said["progress"], said.get("done"))
            elif "error" in said:
                raise MeasureError(said["error"], hint=said.get("hint"), exit_code=child.wait())
            else:
                result = said["result"]
    if result is None:
        raise TqdError(
            f"the measuring process ended with exit code {child.returncode} and no result",
            hint="-9 is a process killed for memory; the model is loaded here once more"
            if child.returncode == -signal.SIGKILL
            else None,
        )
    return result


@contextmanager
def progress() -> Iterator[Heard]:
    """Show a bar on a terminal, and a line for each new thing elsewhere; always on stderr."""
    if not sys.stderr.isatty():
        said: list[str] = []

        def line(text: str, _: float | None) -> None:
            if text not in said[-1:]:
                click.echo(f"{text} …", err=True)
            said.append(text)

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True, markup=False)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(text: str, done: float | None) -> None:
            bar.update(task, description=text, completed=done or 0.0)

        yield show
