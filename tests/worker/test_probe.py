from __future__ import annotations

import pytest

from daemon.worker.probe import describe


@pytest.mark.parametrize(
    ("kind", "info", "memory"),
    [
        ("cpu", {"device_name": "AMD EPYC"}, None),
        ("cuda", {"device_name": "NVIDIA H200", "total_memory": 150, "free_memory": 9}, 150),
        (
            "metal",
            {"device_name": "Apple M4 Max", "memory_size": 64, "max_recommended_working_set_size": 48},
            48,
        ),
    ],
)  # fmt: skip
def test_a_gpu_has_a_memory_and_a_cpu_has_the_machines(
    kind: str, info: dict[str, str | int], memory: int | None
) -> None:
    assert describe(kind, info) == {
        "device": kind,
        "name": info["device_name"],
        "memory_bytes": memory,
    }
