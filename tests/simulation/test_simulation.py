"""Random histories of the supervisor's core; each must keep every promise, whatever happens.

python -m pytest tests/simulation                          the usual round
TQD_SIM_HISTORIES=5000 python -m pytest tests/simulation   more of the same
TQD_SIM_SEED=123 python -m pytest tests/simulation         one history, exactly as it was
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.history import run

HISTORIES = int(os.environ.get("TQD_SIM_HISTORIES", "150"))  # noqa: TID251 - how the suite is run
SEED = os.environ.get("TQD_SIM_SEED")  # noqa: TID251
BATCH = 50

KINDS = 16  # of things that happen in a history


def seeds() -> list[range]:
    if SEED is not None:
        return [range(int(SEED), int(SEED) + 1)]
    return [range(at, min(at + BATCH, HISTORIES)) for at in range(0, HISTORIES, BATCH)]


@pytest.mark.parametrize("batch", seeds(), ids=lambda batch: f"{batch.start}-{batch.stop - 1}")
@pytest.mark.timeout(600)
def test_histories_keep_every_promise(batch: range) -> None:
    for seed in batch:
        run(seed)


def test_a_history_is_what_its_seed_says() -> None:
    assert run(7) == run(7)


def test_histories_contain_everything_that_can_happen() -> None:
    happened: Counter[str] = Counter()
    for seed in range(10):
        happened += run(seed)
    assert len(happened) == KINDS
