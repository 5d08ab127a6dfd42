"""What a worker arranges with its operating system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from daemon.worker.process import SurvivingStream
from tests.worker.child_process import ROOT

PROGRAM = """
import ctypes, os
from daemon.worker.process import die_with_parent
signal = ctypes.c_int()
answers = die_with_parent(os.getppid()), die_with_parent(os.getppid() + 1)
ctypes.CDLL(None).prctl(2, ctypes.byref(signal))  # PR_GET_PDEATHSIG
print(answers, signal.value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of a parent")
def test_the_end_of_the_parent_is_sigterm_and_a_parent_that_is_gone_is_noticed() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, cwd=ROOT)
    assert result.stdout == b"(True, False) 15\n"


def test_writes_after_the_reader_is_gone_go_nowhere() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        surviving = SurvivingStream(stream)
        surviving.write("heard\n")
        assert os.read(reader, 100) == b"heard\n"
        os.close(reader)
        for _ in range(3):
            assert surviving.write("unheard\n") == 8
            surviving.flush()
