"""Fused kernels that are none: they answer by the reference, or fail as a test wants them to."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from daemon.kernels import reference
from daemon.kernels.case import Case
from daemon.kernels.stored import Stored


class FakeKernels:
    """Answers by the reference, changed by *spoil*; refuses the cases for which *refuse* has a reason."""

    def __init__(
        self,
        spoil: Callable[[mx.array], mx.array] = lambda out: out,
        refuse: Callable[[Case], str | None] = lambda _: None,
    ) -> None:
        self._spoil = spoil
        self._refuse = refuse
        self.calls: list[Case] = []

    def refusal(self, case: Case) -> str | None:
        return self._refuse(case)

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        self.calls.append(Case.of(queries, stored, mask, sinks))
        return self._spoil(reference.attend(queries, stored, scale, mask, sinks))


def not_compiled(_: mx.array) -> mx.array:
    raise RuntimeError("[cuda] nvrtc: error: identifier is undefined\n  in line 7")
