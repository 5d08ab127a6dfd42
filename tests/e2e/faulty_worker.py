"""A real worker whose engine fails in the middle of a request, if the file $FAULT says ``raise`` or ``hang``."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

from daemon.worker.main import main
from daemon.worker.scheduler import Scheduler

FAULT = Path(os.environ["FAULT"])  # noqa: TID251 - a child has nothing else to go by
AFTER_STEPS = 20  # tokens have been sent by then

step, busy = Scheduler.step, itertools.count()


def fail_on_demand(scheduler: Scheduler[Any]) -> Any:
    if scheduler.idle or next(busy) < AFTER_STEPS or not FAULT.exists():
        return step(scheduler)
    fault = FAULT.read_text()
    FAULT.unlink()
    if fault == "raise":
        raise RuntimeError("the engine was told to fail")
    while True:
        time.sleep(1)


if __name__ == "__main__":
    Scheduler.step = fail_on_demand  # type: ignore[method-assign]
    os._exit(main())
