"""The one entry to attention over stored keys and values, and the choice of what runs it.

The device decides which fused kernels there are: Metal's, CUDA's, or blocks of plain operations on a CPU.
They run a case only after they have agreed with the reference on it, on this device, in this process;
whatever they refuse or get wrong goes to the reference, and the choice remembers why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Protocol

import mlx.core as mx

from daemon.kernels import cpu, cuda, metal, prompt, proof, reference, step_proof
from daemon.kernels.backend import Backend, Choice, backend_of_device, choose
from daemon.kernels.case import Attend, Case
from daemon.kernels.keys import KeyTransform
from daemon.kernels.packing import TileLayout
from daemon.kernels.stepping import Stepper, Stepping
from daemon.kernels.stored import Stored


class Kernels(Attend, Protocol):
    """A device's fused kernels: `daemon.kernels.cpu`, `metal` and `cuda`."""

    def refusal(self, case: Case) -> str | None:
        """Return why these kernels cannot do *case*, in words for the status; None: they can."""
        ...


_REFERENCE = Choice("reference")


class Attention:
    """Attention on one device; remembers a choice for every case that it has met.

    *kernels* None: there are none, and everything runs on the reference. *prompts* attends from more
    queries than kernels serve; *reading* does so by a device's kernels. *stepping* takes decode steps of
    several rows at once, on a device that can.
    """

    def __init__(
        self,
        backend: Backend = "reference",
        kernels: Kernels | None = None,
        prompts: Attend = reference,
        reading: Kernels | None = None,
        stepping: Stepping | None = None,
    ) -> None:
        self._backend = backend
        self._kernels = kernels
        self._prompts = prompts
        self._reading = reading
        self._stepping = stepping
        self._choices: dict[Case, Choice] = {}
        self._step_choices: dict[tuple[Case, int], Choice] = {}

    def attend(
        self,
        queries: mx.array,
        stored: Stored,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend from the newest tokens' *queries* to everything *stored*; the contract is reference.attend's.

        Kernels are asked only where something is packed: one kind by at most reference.FUSED_QUERIES queries,
        another by more.
        """
        kernels = self._kernels
        if not stored.layout.packed or kernels is None:
            attend = reference.attend  # which leaves what is never packed to MLX
        elif queries.shape[1] > reference.FUSED_QUERIES:
            attend = self._prompts.attend
            if self._reading is not None and _holds_packed(stored):
                case = Case.of(queries, stored, None, sinks)
                attend = self._reading.attend if self.prompt_choice(case).fused else attend
        elif _holds_packed(stored) and self.choice(Case.of(queries, stored, mask, sinks)).fused:
            attend = kernels.attend
        else:
            attend = reference.attend
        return attend(queries, stored, scale, mask, sinks)

    def choice(self, case: Case) -> Choice:
        """Return what runs *case*; the first time, the kernels must prove themselves on it, which takes a moment."""
        if self._kernels is None:
            return _REFERENCE
        if case not in self._choices:
            self._choices[case] = self._choose(self._kernels, case)
        return self._choices[case]

    @property
    def reads_prompts(self) -> bool:
        """Whether the device has kernels for more queries than the others serve."""
        return self._reading is not None

    def prompt_choice(self, case: Case) -> Choice:
        """Return what attends from prompts in layers that are like *case*: the device's kernels, if they have proved themselves."""
        if self._reading is None:
            return _REFERENCE
        # how many queries there are, and a mask, is MLX's affair there
        case = replace(case, queries=reference.FUSED_QUERIES + 1, mask="none")
        if case not in self._choices:
            problem = partial(proof.problem, self._reading, case)
            refusal = self._reading.refusal(case)
            self._choices[case] = choose(self._backend, "read prompts", refusal, problem)
        return self._choices[case]

    @property
    def steps(self) -> bool:
        """Whether the device has kernels that take decode steps of several rows at once."""
        return self._stepping is not None

    def stepper(
        self, case: Case, layout: TileLayout, keys: KeyTransform | None, scale: float, rows: int
    ) -> Stepper | None:
        """Return what takes decode steps of *rows* rows at once, each of them *case*; None: they go one by one.

        It must prove itself as `choice` says.
        """
        if self._stepping is None or not self.step_choice(case, rows).fused:
            return None
        return self._stepping.stepper(case, layout, keys, scale)

    def step_choice(self, case: Case, rows: int) -> Choice:
        """Return what takes decode steps of *rows* rows at once, each of them *case*: kernels, or one by one as `choice` says."""
        room = None if self._stepping is None else self._stepping.room_for(rows)
        if self._stepping is None or room is None or not self.choice(case).fused:
            return _REFERENCE
        if (case, room) not in self._step_choices:
            problem = partial(step_proof.problem, self._stepping, case, room)
            self._step_choices[case, room] = choose(
                self._backend, "take decode steps", None, problem
            )
        return self._step_choices[case, room]

    @property
    def step_choices(self) -> Mapping[tuple[Case, int], Choice]:
        """What takes decode steps, by case and rows that there is room for, as far as it has been asked for."""
        return self._step_choices

    def _choose(self, kernels: Kernels, case: Case) -> Choice:
        problem = partial(proof.problem, kernels, case)
        return choose(self._backend, "attend", kernels.refusal(case), problem)


def _holds_packed(stored: Stored) -> bool:
    return stored.packed_to > stored.packed_from


REFERENCE = Attention()


def on_this_device() -> Attention:
    """Return attention for MLX's default device, with the kernels that this build has for it."""
    return _of(backend_of_device())


@cache
def _of(backend: Backend) -> Attention:
    """Return the attention of *backend*; one for the process, so that nothing is proved twice."""
    match backend:
        case "cpu":
            return Attention(backend, cpu, prompts=prompt)
        case "metal":
            return Attention(backend, metal, reading=metal.prompts)
        case "cuda":
            return Attention(backend, cuda, reading=cuda.prompts, stepping=cuda)
        case "reference" | "mlx":
            return REFERENCE
