"""The process that must not fall over never loads what can take it down."""

from __future__ import annotations

import subprocess
import sys


def test_neither_the_command_line_nor_the_supervisor_loads_mlx() -> None:
    program = (
        "import sys, daemon.cli.main, daemon.supervisor.main;"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in "
        "('mlx', 'mlx_lm', 'transformers', 'numpy') or name.startswith('daemon.worker')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"
