"""What a worker arranges with its operating system: to die with its parent, and to outlive its log."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TextIO, cast

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> bool:
    """Ask Linux to send SIGTERM when the parent ends; return whether process *parent* still is the parent.

    Elsewhere the end of the channel is the only sign.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


def survive_broken_output() -> None:
    """Let stdout and stderr lose their reader without harm."""
    sys.stdout = cast("TextIO", SurvivingStream(sys.stdout))
    sys.stderr = cast("TextIO", SurvivingStream(sys.stderr))


class SurvivingStream:
    """A text stream whose writes never fail; once its reader is gone they go nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write *text*, or drop it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what was buffered."""
        try:
            self._stream.flush()
        except OSError:
            self._discard()

    def isatty(self) -> bool:
        """Return whether a terminal is behind it."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor, for faulthandler and the like."""
        return self._stream.fileno()

    def _discard(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
