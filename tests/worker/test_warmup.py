"""What a server generates before it is ready, so that the first request waits for no compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from daemon.policy.claim import PREFILL_CHUNK
from daemon.worker import engine, model
from daemon.worker.engine import start_engine
from daemon.worker.model import LoadedModel
from daemon.worker.warmup import warm_up
from tests.worker.specs import worker_spec
from tests.worker.tiny_model import write_tiny_model

ROWS = 3


class Watched:
    """A model that notes the shape of everything that it is asked."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, inputs: mx.array, **options: Any) -> mx.array:
        self.shapes.append(tuple(inputs.shape))
        out: mx.array = self._inner(inputs, **options)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def load(folder: Path, context: int) -> LoadedModel:
    spec = worker_spec(max_context=context).model_copy(
        update={"model_path": str(write_tiny_model(folder / "m", max_position_embeddings=context))}
    )
    return model.load(spec, lambda *_: None)


def test_every_number_of_rows_and_a_prompt_of_several_chunks_are_met(tmp_path: Path) -> None:
    loaded = load(tmp_path, 4096)
    watched = Watched(loaded.model)
    told: list[tuple[str, float]] = []

    warm_up(replace(loaded, model=watched), ROWS, lambda *said: told.append(said))

    assert {rows for rows, tokens in watched.shapes if tokens == 1} == {1, 2, 3}
    assert sum(tokens for _, tokens in watched.shapes) > max(PREFILL_CHUNK.values())
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_nothing_longer_than_the_context_is_asked(tmp_path: Path) -> None:
    loaded = load(tmp_path, 16)
    watched = Watched(loaded.model)
    warm_up(replace(loaded, model=watched), ROWS, lambda *_: None)
    longest = max(tokens for _, tokens in watched.shapes)
    assert longest + ROWS + 1 <= 16


@pytest.mark.parametrize(("on_gpu", "times"), [(False, 0), (True, 1)])
def test_only_a_gpu_is_warmed_up_and_before_the_engine_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, times: int
) -> None:
    rows: list[int] = []
    monkeypatch.setattr(engine, "warm_up", lambda _, most, __: rows.append(most))
    monkeypatch.setattr(engine, "compiles_at_first_use", lambda: on_gpu)
    spec = worker_spec(max_concurrent=ROWS).model_copy(
        update={"model_path": str(write_tiny_model(tmp_path / "m"))}
    )
    running = start_engine(spec, progress=lambda *_: None, on_failure=lambda _: None)
    running.close()
    assert rows == [ROWS] * times
