"""Kernels for Apple GPUs: what daemon.kernels.attention and daemon.kernels.encode ask for.

They are executed and compared with the reference on a CPU emulation of Metal's language
(tests/metalshim). No Apple machine has run them.
"""

from daemon.kernels.metal.attending import attend, refusal
from daemon.kernels.metal.encoding import encoding_refusal, tiles
from daemon.kernels.metal.restoring import prompts

__all__ = ["attend", "encoding_refusal", "prompts", "refusal", "tiles"]
