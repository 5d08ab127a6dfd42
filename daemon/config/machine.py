"""How much memory this machine has for models, without MLX.

On Linux a control group may allow less than there is. On a Mac the GPU takes its memory from the
machine's, up to a limit; an NVIDIA GPU has its own, which is then the memory that models share.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from daemon.config import pressure
from daemon.config.pressure import Pressure
from daemon.policy.claim import Device
from daemon.units import MemoryBudget

MODEL_SHARE = 0.75  # the rest is for the system, the page cache and other programs

_NO_LIMIT = 2**60  # cgroup v1 says "none" by a number near 2^63
_PRESSURE = "kern.memorystatus_vm_pressure_level"
_SYSCTLS = ("hw.memsize", "iogpu.wired_limit_mb")
_PAGES = re.compile(r'^"?([\w -]+?)"?:\s+(\d+)\.$', re.MULTILINE)
_FREE_PAGES = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What MLX computes on. *memory_bytes* is a GPU's own memory, or the most that a Mac's should use."""

    device: Device
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory that all models share: the machine's or its container's, or the GPU's own.

    *ceiling_bytes* is the most of it that the GPU may use, where that is less.
    """

    total_bytes: int
    device: Device = "cpu"
    device_name: str = "cpu"
    ceiling_bytes: int | None = None

    def budget_bytes(self, setting: MemoryBudget = "auto") -> int:
        """Return what all servers together may use under `daemon.memory_budget`; never more than there is."""
        most = self.total_bytes
        if setting == "auto":
            return min(int(most * MODEL_SHARE), self.ceiling_bytes or most)
        wanted = int(most * setting) if isinstance(setting, float) else setting
        return min(wanted, most)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of this machine now, in bytes: what could be had without swapping, and what is swapped.

    *wired_bytes*: what nobody can swap, of all programs and the system; only a Mac counts it.
    """

    total_bytes: int
    available_bytes: int
    swap_used_bytes: int
    wired_bytes: int | None = None
    pressure: Pressure | None = None


@dataclass(frozen=True, slots=True)
class VmStat:
    """What macOS could hand out, and what is wired, in bytes."""

    available_bytes: int
    wired_bytes: int | None


def machine(facts: DeviceFacts | None = None) -> Machine:
    """Return this machine; without *facts* it is one whose models run on the CPU."""
    total, wired = memory_bytes(), None
    if sys.platform == "darwin":
        wired = parse_sysctl(_output("sysctl", *_SYSCTLS)).get("iogpu.wired_limit_mb", 0) * 2**20
    if facts is None:
        return Machine(total)
    return describe(total, facts, wired_limit_bytes=wired)


def describe(
    total_bytes: int, facts: DeviceFacts, *, wired_limit_bytes: int | None = None
) -> Machine:
    """Return the machine with *total_bytes* and the device of *facts*.

    *wired_limit_bytes* is what a Mac's owner lets the GPU wire; 0 or None: the system's own choice.
    """
    match facts.device:
        case "cuda" if facts.memory_bytes:
            return Machine(facts.memory_bytes, "cuda", facts.name)
        case "metal":
            return Machine(
                total_bytes, "metal", facts.name, wired_limit_bytes or facts.memory_bytes
            )
        case _:
            return Machine(total_bytes, facts.device, facts.name)


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container this process may not exceed."""
    total = psutil.virtual_memory().total
    return min(total, limit) if (limit := cgroup_limit()) else total


def host_memory() -> HostMemory:
    """Return the memory of this machine, or container, as it is now."""
    found = psutil.virtual_memory()
    total, available = found.total, found.available
    swapped = psutil.swap_memory().used
    if sys.platform == "darwin":
        now = parse_vm_stat(_output("vm_stat")) or VmStat(available, None)
        level = parse_sysctl(_output("sysctl", _PRESSURE)).get(_PRESSURE)
        said = pressure.from_mac(level)
        return HostMemory(total, now.available_bytes, swapped, now.wired_bytes, said)
    if limit := cgroup_limit():
        used = cgroup_used()
        total = min(total, limit)
        available = min(available, max(0, limit - used)) if used is not None else available
    judged = pressure.judge(available, total, pressure.parse_stalls(_stalls()))
    return HostMemory(total, available, swapped, pressure=judged)


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Return the least memory limit of this process's control group and of those above it; None: none."""
    return min((limit for folder in _groups(root) if (limit := _limit(folder))), default=None)


def cgroup_used(root: Path = Path("/")) -> int | None:
    """Return what the limited control group uses, without the page cache that it would give back."""
    for folder in _groups(root):
        if not _limit(folder):
            continue
        for name, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):  # fmt: skip
            used = _number(folder / name)
            if used is not None:
                return max(0, used - _stat(folder).get(cache, 0))
    return None


def parse_sysctl(text: str) -> Mapping[str, int]:
    """Return the numbers in what `sysctl NAME...` prints; names that this system lacks are left out."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): int(value) for name, _, value in pairs if value.strip().isdigit()}


def parse_vm_stat(text: str) -> VmStat | None:
    """Return what `vm_stat` prints; None: that is no such text."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = {name: int(count) for name, count in _PAGES.findall(text)}
    if size is None or "Pages free" not in pages:
        return None
    page, wired = int(size[1]), pages.get("Pages wired down")
    available = page * sum(pages.get(name, 0) for name in _FREE_PAGES)
    return VmStat(available, None if wired is None else page * wired)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it, in version 2, else 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    mounts = (("", root / "sys/fs/cgroup"), ("memory", root / "sys/fs/cgroup/memory"))
    for controller, top in mounts:
        for _, controllers, path in entries:
            if controller in controllers.split(","):
                # a container sees its own group at the top, whatever its path says outside
                own = top / path.strip("/")
                yield from (it for it in (own, *own.parents) if it.is_relative_to(top))


def _limit(folder: Path) -> int | None:
    """Return the limit of one control group; None without one ("max", a huge number, no such file)."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(folder / name)
        if limit and limit < _NO_LIMIT:
            return limit
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stalls() -> str:
    try:
        return Path("/proc/pressure/memory").read_text()
    except OSError:
        return ""


def _stat(folder: Path) -> Mapping[str, int]:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _output(*command: str) -> str:
    """Return what a program of macOS prints; nothing where it cannot be run."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
