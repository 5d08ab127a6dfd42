"""Which device's kernels there are, and how it is decided whether they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from daemon.errors import first_line

Backend = Literal["reference", "cpu", "metal", "cuda", "mlx"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs a case, and why not the device's kernels; *failed*: they should have been able to.

    Where nothing is packed there is no case, and mlx runs by itself.
    """

    backend: Backend
    reason: str | None = None
    failed: bool = False

    @property
    def fused(self) -> bool:
        """Whether the device's kernels run it."""
        return self.backend != "reference"


def choose(
    backend: Backend, task: str, refusal: str | None, problem: Callable[[], str | None]
) -> Choice:
    """Return *backend* unless its kernels refuse, or have a *problem*, which is asked for only if they do not.

    A problem is the end of a sentence that begins with the kernels. Whatever keeps them from being proved is
    one too, so that a server runs without them: *task* tells at what.
    """
    if refusal is not None:
        return Choice("reference", refusal)
    try:
        found = problem()
    except Exception as error:  # noqa: BLE001 - a device's compiler or driver raises what it likes
        found = f"fail to {task} on this device ({type(error).__name__}: {first_line(error)})"
    if found is not None:
        return Choice("reference", f"the {backend} kernels {found}", failed=True)
    return Choice(backend)


def backend_of(*, gpu: bool, metal: bool, cuda: bool) -> Backend:
    """Return whose kernels fit a device: *gpu* is MLX's default, and MLX was built for *metal* or *cuda*."""
    if not gpu:
        return "cpu"
    if metal:
        return "metal"
    return "cuda" if cuda else "reference"


def backend_of_device() -> Backend:
    """Return whose kernels fit MLX's default device."""
    return backend_of(
        gpu=mx.default_device() != mx.Device(mx.cpu),
        metal=mx.metal.is_available(),
        cuda=mx.cuda.is_available(),
    )


def device_name() -> str:
    """Return the name of MLX's default device: a GPU's own, or cpu."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return "cpu" if on_cpu else str(mx.device_info().get("device_name", "gpu"))


def computed(array: mx.array) -> mx.array:
    """Return *array* in memory of the device's own: what is made from the host's data, CUDA would read over PCIe at every use."""
    return mx.zeros_like(array) + array  # in this order: a sum takes the memory of its first term


def on_hopper() -> bool:
    """Return whether MLX's default device is a GPU of the generation that our tensor-core kernel is written for."""
    return backend_of_device() == "cuda" and mx.device_info().get("compute_capability_major") == 9
