"""The memory of a machine, from what Linux and macOS were recorded to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.machine import (
    DeviceFacts,
    Machine,
    VmStat,
    cgroup_limit,
    cgroup_used,
    describe,
    host_memory,
    memory_bytes,
    parse_sysctl,
    parse_vm_stat,
)

GIB = 2**30

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                  123456.
Pages active:                                987654.
Pages inactive:                              234567.
Pages speculative:                            34567.
Pages throttled:                                  0.
Pages wired down:                            345678.
Pages purgeable:                               4567.
"Translation faults":                    1234567890.
Pages copy-on-write:                       12345678.
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_the_least_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """Cgroup v2, as a service of systemd sees it: the unit has no limit of its own, the slice above it has."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/user-1000.slice/tqd.service",
            "sys/fs/cgroup/user.slice/user-1000.slice/tqd.service/memory.max": "max",
            "sys/fs/cgroup/user.slice/user-1000.slice/memory.max": str(8 * GIB),
            "sys/fs/cgroup/user.slice/user-1000.slice/memory.current": str(3 * GIB),
            "sys/fs/cgroup/user.slice/user-1000.slice/memory.stat": f"anon 1\ninactive_file {GIB}",
            "sys/fs/cgroup/user.slice/memory.max": str(16 * GIB),
        },
    )
    assert cgroup_limit(root) == 8 * GIB
    assert cgroup_used(root) == 2 * GIB  # the page cache would be given back


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(4 * GIB)},
    )
    assert cgroup_limit(root) == 4 * GIB


def test_a_path_from_outside_the_container_still_leads_to_the_top(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/docker/0123abc", "sys/fs/cgroup/memory.max": str(4 * GIB)},
    )
    assert cgroup_limit(root) == 4 * GIB


def test_version_1_is_read_where_there_is_no_2(tmp_path: Path) -> None:
    lines = "9:name=systemd:/\n8:pids:/a\n4:memory:/box/inner\n3:cpuset:/\n0::/"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": lines,
            "sys/fs/cgroup/memory/box/inner/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(6 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {GIB // 2}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert cgroup_limit(root) == 6 * GIB
    assert cgroup_used(root) == 3 * GIB // 2


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/"}, {"proc/self/cgroup": "odd"}])
def test_no_limit_is_none(tmp_path: Path, files: dict[str, str]) -> None:
    root = write(tmp_path, files)
    assert cgroup_limit(root) is None
    assert cgroup_used(root) is None


def test_this_machine_has_some_memory() -> None:
    assert memory_bytes() > 0


def test_what_sysctl_prints() -> None:
    assert parse_sysctl("hw.memsize: 68719476736\niogpu.wired_limit_mb: 0\n") == {
        "hw.memsize": 64 * GIB,
        "iogpu.wired_limit_mb": 0,
    }
    assert parse_sysctl("sysctl: unknown oid 'iogpu.wired_limit_mb'\nhw.memsize: 8\n") == {
        "hw.memsize": 8
    }


def test_what_vm_stat_prints() -> None:
    available, wired = 16384 * (123456 + 234567 + 34567 + 4567), 16384 * 345678
    assert parse_vm_stat(VM_STAT) == VmStat(available, wired)
    assert parse_vm_stat(VM_STAT.replace("wired", "tied")) == VmStat(available, None)
    assert parse_vm_stat("") is None
    assert parse_vm_stat("vm_stat: command not found") is None


def test_a_mac_is_asked_what_it_could_hand_out_what_is_wired_and_how_short_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {"vm_stat": VM_STAT, "sysctl": "kern.memorystatus_vm_pressure_level: 2\n"}
    monkeypatch.setattr("daemon.config.machine.sys.platform", "darwin")
    monkeypatch.setattr("daemon.config.machine._output", lambda program, *_: said[program])
    now = host_memory()
    assert (now.wired_bytes, now.pressure) == (16384 * 345678, "warn")
    assert now.available_bytes == 16384 * (123456 + 234567 + 34567 + 4567)

    monkeypatch.setattr("daemon.config.machine._output", lambda *_: "")
    silent = host_memory()
    assert (silent.wired_bytes, silent.pressure) == (None, None)
    assert silent.available_bytes > 0


@pytest.mark.parametrize(
    ("facts", "wired", "total", "auto"),
    [
        (DeviceFacts("cpu", "x"), None, 64 * GIB, 48 * GIB),
        # an NVIDIA GPU has a memory of its own
        (DeviceFacts("cuda", "x", 140 * GIB), None, 140 * GIB, 105 * GIB),
        (DeviceFacts("cuda", "x"), None, 64 * GIB, 48 * GIB),
        # a Mac's GPU takes the machine's, up to its working set, or to what its owner lets it wire
        (DeviceFacts("metal", "x", 40 * GIB), 0, 64 * GIB, 40 * GIB),
        (DeviceFacts("metal", "x", 50 * GIB), 0, 64 * GIB, 48 * GIB),
        (DeviceFacts("metal", "x", 40 * GIB), 46 * GIB, 64 * GIB, 46 * GIB),
    ],
)
def test_auto_is_three_quarters_of_the_memory_that_counts(
    facts: DeviceFacts, wired: int | None, total: int, auto: int
) -> None:
    machine = describe(64 * GIB, facts, wired_limit_bytes=wired)
    assert machine.device == facts.device
    assert machine.total_bytes == total
    assert machine.budget_bytes() == auto


def test_a_budget_is_a_size_or_a_share_and_never_more_than_there_is() -> None:
    machine = Machine(64 * GIB, ceiling_bytes=40 * GIB)
    assert machine.budget_bytes(5 * GIB) == 5 * GIB
    assert machine.budget_bytes(0.25) == 16 * GIB
    assert machine.budget_bytes(100 * GIB) == 64 * GIB
    assert machine.budget_bytes("auto") == 40 * GIB
