"""``python -m daemon.worker``: one worker, as the supervisor starts it."""

from __future__ import annotations

import os

from daemon.worker.main import main

if __name__ == "__main__":
    # a thread inside MLX cannot be joined, and taking the interpreter down around it aborts the process
    os._exit(main())
