"""A real worker whose engine fails in the middle of an answer once the file $FAULT says ``raise`` or ``hang``."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path
from typing import Any

from daemon.worker.main import main
from daemon.worker.scheduler import Scheduler

FAULT = Path(os.environ["FAULT"])  # noqa: TID251 - a child has nothing else to go by

STEPS = 30  # of an answer of 100 tokens

step = Scheduler.step
steps = count(1)


def fail_on_demand(scheduler: Scheduler[Any]) -> Any:
    due = FAULT.exists() and not scheduler.idle and next(steps) == STEPS
    fault = FAULT.read_text() if due else ""
    if fault:
        FAULT.unlink()
    if fault == "raise":
        raise RuntimeError("the engine was told to fail")
    while fault == "hang":
        time.sleep(1)
    return step(scheduler)


if __name__ == "__main__":
    Scheduler.step = fail_on_demand  # type: ignore[method-assign]
    os._exit(main())
