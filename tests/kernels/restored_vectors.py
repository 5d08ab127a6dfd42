"""What a row holds, as the model made it, from the codes themselves in float64: what kernels that unpack are compared with."""

from __future__ import annotations

import numpy as np

from daemon.kernels import codec, packing, rotation
from daemon.kernels.rotation import Side
from daemon.kernels.stored import Stored
from tests.kernels.float64 import Float, wide


def vectors(stored: Stored, side: Side) -> Float:
    """Return all keys or values of *stored* as the model made them, from the codes themselves."""
    raw, kind, dim = (
        (stored.k, stored.layout.k, stored.layout.dim_k)
        if side == "k"
        else (stored.v, stored.layout.v, stored.layout.dim_v)
    )
    packed = packing.unpack(stored.tiles_in_use(), stored.layout)
    codes, scales = packed.k if side == "k" else packed.v  # type: ignore[misc]  # a packed side has both
    begin, end = stored.packed_from, stored.packed_to
    numbers, factors = codec.decode(codes[:, begin:end], scales[:, begin:end], kind)
    middle = wide(numbers) * wide(factors)[..., None] @ wide(rotation.matrix(dim, side)).T
    keys = stored.keys
    if side == "k" and keys is not None:
        middle = middle * wide(keys.scale)[:, None]
        if keys.mean is not None and keys.rotary is not None:
            first, last = stored.packed_positions
            middle = middle + wide(keys.rotary.shift(keys.mean, first, last - first))
        elif keys.mean is not None:
            middle = middle + wide(keys.mean)[:, None]
    parts = [raw.head, middle, raw.tail]
    return np.concatenate(
        [
            part if isinstance(part, np.ndarray) else wide(part)
            for part in parts
            if part is not None
        ],
        axis=1,
    )
