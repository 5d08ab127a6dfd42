"""`make unit`: the test suite in two processes side by side, tests that compute and all others.

    python scripts/suite.py [PYTEST ARGUMENT …]

Tests of kernels and caches keep one core busy; most of the others start processes and wait for them. In each of the
two, tests run one after the other. What the first says is shown when both have ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

COMPUTING = ("tests/kernels", "tests/cudashim", "tests/cache")


def main(arguments: Sequence[str]) -> int:
    """Run both halves, one after the other on a single core; return 0, or the status of one that has failed."""
    pytest = (sys.executable, "-m", "pytest", *arguments)
    others = (*pytest, "tests", *(f"--ignore={folder}" for folder in COMPUTING))
    with tempfile.TemporaryFile() as said:
        computing = subprocess.Popen((*pytest, *COMPUTING), stdout=said, stderr=subprocess.STDOUT)
        try:
            if (os.cpu_count() or 1) < 2:
                computing.wait()
            failed = subprocess.run(others, check=False).returncode
        finally:  # an interrupt reaches both, and this one is waited for
            computed = computing.wait()
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    return failed or computed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
