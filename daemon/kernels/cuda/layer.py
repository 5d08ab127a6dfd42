"""What the tensor-core kernels need to know of a layer, apart from tokens: made once, and kept on the device."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from daemon.kernels import codebook, rotation
from daemon.kernels.backend import computed
from daemon.kernels.cuda import angles, sources
from daemon.kernels.cuda.plan import FastShape
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TileLayout
from daemon.policy.schemes import INT8, Codec

FEWEST = 16  # numbers of an array: one of 8 bytes or fewer would live in memory that a GPU reads over PCIe


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer's fast kernel needs to know, apart from tokens: its layout, and its constants on the device.

    *constants*: signs times key scales (KV heads, D), signs of values (D,), means (KV heads, D), and the
    words of the rotary embedding (angles.constants), float32 one after the other. Pair j of channels that
    rotate together is (j·step, j·step + gap).
    """

    constants: mx.array
    layout: TileLayout
    n_kv_heads: int
    has_mean: bool = False
    n_pairs: int = 0
    step: int = 1
    gap: int = 0
    variants: dict[tuple[int, mx.Dtype, float], Variant] = field(default_factory=dict)

    def variant(self, grouped: int, dtype: mx.Dtype, scale: float) -> Variant:
        """Return the variant of the kernel for *grouped* query heads a KV head; made when first asked for."""
        key = (grouped, dtype, scale)
        if key not in self.variants:
            self.variants[key] = self._variant(grouped, dtype, scale)
        return self.variants[key]

    def _variant(self, grouped: int, dtype: mx.Dtype, scale: float) -> Variant:
        k, v, dim = self.layout.k, self.layout.v, self.layout.dim_k
        shape = FastShape(dim, grouped, int(k.bits), int(v.bits), self.n_pairs > 0)
        constants = {
            "DIM": dim, "GROUPED": grouped, "K_BITS": shape.k_bits, "V_BITS": shape.v_bits,
            "ROTARY": int(shape.rotary), "HAS_MEAN": int(self.has_mean), "N_PAIRS": self.n_pairs,
            "PAIR_STEP": self.step, "PAIR_GAP": self.gap, "SCALE": bits_of(scale),
            "K_STEP": bits_of(_step(k, dim)), "V_STEP": bits_of(_step(v, dim)),
            "SHARED": shape.shared_bytes,
        }  # fmt: skip
        return Variant(constants, dtype)


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of the fast kernel; *kernels* by the rows that they have room for, and whether there are sinks."""

    constants: dict[str, int]
    dtype: mx.Dtype
    kernels: dict[tuple[int, bool], Any] = field(default_factory=dict)

    def kernel(self, room: int, *, sinks: bool) -> Any:
        """Return the kernel with *room*; made when first asked for."""
        key = (room, sinks)
        if key not in self.kernels:
            self.kernels[key] = sources.fast_kernel(self.constants, self.dtype, room, sinks=sinks)
        return self.kernels[key]


def on_device(numbers: np.ndarray[Any, Any]) -> mx.array:
    """Return *numbers* in memory of the GPU's own."""
    return computed(mx.array(numbers))


# By identity: hashing a layout at every call would cost more than the rest of it.
_LAYERS: WeakKeyDictionary[KeyTransform, tuple[TileLayout, int, Layer | None]] = WeakKeyDictionary()
_PLAIN_LAYERS: dict[tuple[int, int], Layer] = {}


def layer_of(layout: TileLayout, n_kv_heads: int, keys: KeyTransform | None) -> Layer | None:
    """Return what the fast kernel needs of a layer; None: its rotary embedding is not one that it can do."""
    if keys is None:
        known = _PLAIN_LAYERS.get((id(layout), n_kv_heads))
        if known is None:  # the layer keeps the layout, so the id stays its own
            known = _layer(layout, n_kv_heads, None)
            assert known is not None
            _PLAIN_LAYERS[id(layout), n_kv_heads] = known
        return known
    of, heads, layer = _LAYERS.get(keys, (None, 0, None))
    if of is not layout or heads != n_kv_heads:
        layer = _layer(layout, n_kv_heads, keys)
        _LAYERS[keys] = (layout, n_kv_heads, layer)
    return layer


def _layer(layout: TileLayout, n_kv_heads: int, keys: KeyTransform | None) -> Layer | None:
    dim = layout.dim_k
    k_signs = np.broadcast_to(np.array(rotation.signs(dim, "k")), (n_kv_heads, dim))
    mean = np.zeros((n_kv_heads, dim), dtype=np.float32)
    words = np.zeros(angles.WORDS, dtype=np.uint32)
    n_pairs, step, gap = 0, 1, 0
    if keys is not None:
        k_signs = k_signs * np.array(keys.scale)
    if keys is not None and keys.mean is not None:
        mean = np.array(keys.mean).astype(np.float32)
        if keys.rotary is not None:
            turning = angles.angles(keys.rotary, dim)
            if turning is None:
                return None
            words = angles.constants(turning.theta)
            n_pairs, step, gap = len(turning.theta), turning.step, turning.gap
            for channels in (keys.rotary.first, keys.rotary.second):
                mean[:, channels] *= turning.factor.astype(np.float32)
    parts = (k_signs, np.array(rotation.signs(dim, "v")), mean, words.view(np.float32))
    constants = on_device(np.concatenate([part.ravel() for part in parts]).view(np.uint32))
    constants = constants.view(mx.float32)
    mx.eval(constants)
    has_mean = keys is not None and keys.mean is not None
    return Layer(constants, layout, n_kv_heads, has_mean, n_pairs, step, gap)


def _step(kind: Codec, dim: int) -> float:
    return 1.0 if kind == INT8 else codebook.step(kind.bits, dim)


def bits_of(number: float) -> int:
    """Return the bits of *number* as float32: template arguments are integers."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
