"""A real worker whose engine fails on demand, while the file $FAULT says ``raise`` or ``hang``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from daemon.worker.main import main
from daemon.worker.scheduler import Scheduler

FAULT = Path(os.environ["FAULT"])  # noqa: TID251 - a child has nothing else to go by

step = Scheduler.step


def fail_on_demand(scheduler: Scheduler[Any]) -> Any:
    fault = FAULT.read_text() if FAULT.exists() and not scheduler.idle else ""
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
