"""Generate a little before the first request does.

On a GPU, MLX compiles a kernel when it is first asked for one of its kind: for another number of rows,
for a prompt instead of a token. That takes seconds each time, and is kept on disk for the next worker.
Done before the server is ready, it delays nobody; and a model that cannot generate never becomes ready.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from daemon.kernels.backend import backend_of_device
from daemon.policy.claim import PREFILL_CHUNK
from daemon.worker.model import LoadedModel, Progress
from daemon.worker.requests import GenerationRequest, Sampling
from daemon.worker.scheduler import Scheduler

_SHORT_PROMPT = 24  # tokens
_SAMPLED = Sampling(temperature=0.7, top_p=0.9, seed=0)
_GREEDY = Sampling(temperature=0.0)


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    submitted_at: float = field(default_factory=time.monotonic)


def compiles_at_first_use() -> bool:
    """Return whether MLX compiles kernels here while it runs; on a CPU it brings nearly all of them along."""
    return backend_of_device() != "cpu"


def warm_up(loaded: LoadedModel, max_concurrent: int, progress: Progress) -> None:
    """Generate with every number of rows up to *max_concurrent*, after short prompts and one of more than a chunk.

    Raises:
        Exception: whatever MLX raises where the model cannot generate here.
    """
    report = partial(progress, "compiling what requests need")
    report(0.0)
    scheduler: Scheduler[_Sequence] = Scheduler(loaded, max_concurrent)
    waves = _requests(loaded.max_context, max_concurrent)
    total = sum(request.max_tokens for wave in waves for request in wave)
    for wave in waves:
        for request in wave:
            scheduler.add(_Sequence(request))
        while not scheduler.idle:
            scheduler.step()
            report(scheduler.generation_tokens_total / total)


def _requests(max_context: int, rows: int) -> list[list[GenerationRequest]]:
    """Return two waves of requests: one long prompt, then short ones that end one after the other."""
    room = max_context - rows - 2
    long = min(max(PREFILL_CHUNK.values()) + _SHORT_PROMPT, room)
    return [
        [_request(max(1, long), 2, _GREEDY)],
        [
            _request(max(1, min(_SHORT_PROMPT + row, room)), 2 + row, (_SAMPLED, _GREEDY)[row % 2])
            for row in range(rows)
        ],
    ]


def _request(prompt: int, tokens: int, sampling: Sampling) -> GenerationRequest:
    # any tokens do: two that every vocabulary has
    return GenerationRequest(
        tuple(at % 2 for at in range(prompt)), tokens, sampling, ignore_eos=True
    )
