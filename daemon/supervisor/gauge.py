"""Look at the memory that workers really use, and at what the machine has left, every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from daemon.config.machine import HostMemory, host_memory
from daemon.supervisor import plan
from daemon.supervisor.reconcile import Reconciler

EVERY_S = 5.0

_RUSAGE_INFO_V0 = 0
_RUSAGE_BYTES = 96  # struct rusage_info_v0: a uuid of 16 bytes and ten 64-bit numbers
_PHYS_FOOTPRINT_AT = 72

_PAGE = resource.getpagesize()

Worker = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory at one moment: of the machine, and the footprint of each worker's process by server and launch."""

    host: HostMemory
    footprints: Mapping[Worker, int] = field(default_factory=dict)


class Gauge:
    """Tells *reconciler* what it reads; `reading` is the latest."""

    def __init__(self, reconciler: Reconciler) -> None:
        self.reading: Reading | None = None
        self._reconciler = reconciler

    async def run(self) -> None:
        """Look every few seconds, and whenever a worker has ended, until cancelled."""
        while True:
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._reconciler.exits.wait()
            self._reconciler.exits.clear()

    async def look(self) -> None:
        """Look once."""
        servers = self._reconciler.fleet.servers.values()
        pids = {
            (it.name, it.worker.launch): it.worker.pid
            for it in servers
            if it.worker is not None and it.worker.pid is not None
        }
        self.reading = reading = await asyncio.to_thread(read, pids)
        machine = self._reconciler.wanted.machine
        if machine is not None and machine.device == "cuda":
            # the memory that counts is the GPU's: workers say what they have of it
            self._reconciler.tell(plan.Measured(self._on_device(), available=None))
        else:
            available = reading.host.available_bytes
            self._reconciler.tell(plan.Measured(reading.footprints, available))

    def _on_device(self) -> Mapping[Worker, int]:
        return {
            (name, report.launch): report.snapshot.mlx_active_bytes
            + report.snapshot.mlx_cache_bytes
            for name, report in self._reconciler.workers.reports.items()
            if report.snapshot is not None
        }


def read(pids: Mapping[Worker, int]) -> Reading:
    """Return the memory of the machine and of the processes *pids*; one that has ended is left out."""
    found = {}
    for worker, pid in pids.items():
        with contextlib.suppress(psutil.Error, OSError):
            found[worker] = footprint(pid)
    return Reading(host_memory(), found)


def footprint(pid: int) -> int:
    """Return the bytes of memory that process *pid* accounts for: resident, or a Mac's physical footprint.

    Raises:
        psutil.Error: there is no such process, or it is none of ours.
        OSError: likewise.
    """
    if sys.platform == "linux":  # psutil says the same at three times the price
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return _physical_footprint(pid) or int(psutil.Process(pid).memory_info().rss)


def _physical_footprint(pid: int) -> int | None:
    """Return what macOS holds against process *pid*, memory that the GPU has wired included."""
    usage: Callable[..., int] = ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    return None if usage(pid, _RUSAGE_INFO_V0, buffer) else parse_rusage(buffer.raw)


def parse_rusage(raw: bytes) -> int:
    """Return ri_phys_footprint of a `struct rusage_info_v0`."""
    (size,) = struct.unpack_from("=Q", raw, _PHYS_FOOTPRINT_AT)
    return int(size)
