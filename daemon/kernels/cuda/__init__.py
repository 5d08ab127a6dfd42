"""Fused attention on NVIDIA GPUs; `refusal` and `attend` are what daemon.kernels.attention asks for."""

from daemon.kernels.cuda.launch import attend
from daemon.kernels.cuda.plan import refusal

__all__ = ["attend", "refusal"]
