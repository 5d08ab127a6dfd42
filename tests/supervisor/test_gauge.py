"""Reading the memory of processes, and of a Mac's from a recorded structure."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import psutil

from daemon.supervisor import gauge


def test_a_process_that_has_ended_is_left_out() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    reading = gauge.read({("me", 1): os.getpid(), ("gone", 2): ended.pid})
    assert reading.footprints.keys() == {("me", 1)}
    assert reading.footprints["me", 1] > 2**20
    assert 0 < reading.host.available_bytes <= reading.host.total_bytes


def test_the_footprint_is_what_the_process_keeps_resident() -> None:
    assert gauge.footprint(os.getpid()) <= psutil.virtual_memory().total


def test_the_physical_footprint_stands_after_seven_numbers() -> None:
    """Struct rusage_info_v0: uuid, user_time, system_time, two wakeups, pageins, wired, resident, footprint, two times."""
    numbers = (11, 12, 13, 14, 15, 16, 17, 5 * 2**30, 18, 19)
    assert gauge.parse_rusage(bytes(16) + struct.pack("=10Q", *numbers)) == 5 * 2**30
