"""How much memory this machine has for models, without MLX."""

from __future__ import annotations

from pathlib import Path

import psutil

MODEL_SHARE = 0.75  # the rest is for the system, the page cache and other programs

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container this process may not exceed."""
    return min([psutil.virtual_memory().total, *filter(None, map(_limit, _CGROUP_LIMITS))])


def budget_bytes(total: int) -> int:
    """Return what all servers together may use of *total*."""
    return int(total * MODEL_SHARE)


def _limit(path: Path) -> int | None:
    """Return the limit in a cgroup file; None without one ("max", or no such file)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) > 0 else None
