"""`tqd` on a machine of a terabyte: a hundred stub workers must not wait for memory that they do not use."""

from __future__ import annotations

from daemon.cli.main import main
from daemon.config import machine

if __name__ == "__main__":
    machine.memory_bytes = lambda: 2**40
    main()
