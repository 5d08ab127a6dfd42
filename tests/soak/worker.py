"""The worker command of a soak: a stub where the entry's environment has orders for one, else a real worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

STUB = Path(__file__).parents[1] / "stub_worker.py"

stub = "STUB_NAME" in os.environ  # noqa: TID251 - a child has nothing else to go by
program = [str(STUB)] if stub else ["-m", "daemon.worker"]
os.execv(sys.executable, [sys.executable, *program, *sys.argv[1:]])
