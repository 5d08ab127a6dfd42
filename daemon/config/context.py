"""What MLX computes with here: the versions, and what a process says that tries it out in the place of a worker."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

PACKAGES = (
    "tqd",
    "mlx",
    "mlx-lm",
    "mlx-metal",
    "mlx-cpu",
    "mlx-cuda-12",
    "mlx-cuda-13",
    "transformers",
)


def installed(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of those *packages* that this interpreter has."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class MlxContext(BaseModel):
    """Where MLX computes here, and that it does; *memory_bytes* is what the device has or should use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    device_name: str
    memory_bytes: int | None
    multiply_ms: float
    correct: bool
    versions: dict[str, str]
    python: str
    executable: str
