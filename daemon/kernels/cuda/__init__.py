"""Fused kernels for NVIDIA GPUs: what daemon.kernels.attention and daemon.kernels.encode ask for."""

from daemon.kernels.cuda.encoding import encoding_refusal, tiles
from daemon.kernels.cuda.launch import attend
from daemon.kernels.cuda.plan import refusal, room_for
from daemon.kernels.cuda.restoring import prompts
from daemon.kernels.cuda.stepping import stepper

__all__ = ["attend", "encoding_refusal", "prompts", "refusal", "room_for", "stepper", "tiles"]
