"""What `tqd doctor` hears from the process that tries MLX out in the place of a worker."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
