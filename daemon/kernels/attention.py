"""The one entry to attention over stored keys and values; picks the backend by device."""

from __future__ import annotations

import mlx.core as mx

from daemon.kernels import latent, reference
from daemon.kernels.stored import Stored


def backend() -> str:
    """Return the name of the backend that runs on the default device."""
    return "reference"


def attend(
    queries: mx.array, stored: Stored, scale: float, mask: mx.array | None, sinks: mx.array | None
) -> mx.array:
    """Attend from the newest tokens' *queries* to everything *stored*; the contract is reference.attend's."""
    return reference.attend(queries, stored, scale, mask, sinks)


def attend_latent(
    queries: mx.array, stored: Stored, scale: float, mask: mx.array | None, sinks: mx.array | None
) -> mx.array:
    """Attend from the newest token's *queries* to every latent *stored*; the contract is latent.attend's."""
    return latent.attend(queries, stored, scale, mask, sinks)
