"""The demo model through the real engine: what the README promises about it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from daemon.config.wire import WorkerSpec
from daemon.policy import store
from daemon.policy.request import request as kv_request
from daemon.policy.spec import KvSpec
from daemon.worker.engine import LoadedEngine, start_engine
from daemon.worker.requests import GenerationRequest, Sampling
from tests.worker.specs import worker_spec

pytestmark = [pytest.mark.model, pytest.mark.e2e]

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write one sentence about a river.",
    "List three colours.",
)


def spec_for(folder: Path, **kv: Any) -> WorkerSpec:
    asked = KvSpec(**kv)
    spec = worker_spec(max_concurrent=4)
    return spec.model_copy(
        update={
            "model_path": str(folder),
            "kv": kv_request(asked, store.load_policies().policies),
            "server": spec.server.model_copy(update={"kv": asked}),
        }
    )


@pytest.fixture(
    scope="module", params=[{"policy": "exact"}, {"mode": "turbo8v4"}], ids=["exact", "turbo8v4"]
)
def loaded(request: pytest.FixtureRequest, demo_model_path: Path) -> Iterator[LoadedEngine]:
    running = start_engine(
        spec_for(demo_model_path, **request.param),
        progress=lambda *_: None,
        on_failure=lambda _: None,
    )
    yield running
    running.close()


def prompt_of(tokenizer: Any, question: str) -> list[int]:
    tokens: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    return tokens


async def answers(loaded: LoadedEngine, count: int) -> list[list[int]]:
    async def answer(question: str) -> list[int]:
        asked = GenerationRequest(
            tuple(prompt_of(loaded.tokenizer, question)),
            max_tokens=count,
            sampling=Sampling(temperature=0),
        )
        return [event.token async for batch in loaded.engine.submit(asked) for event in batch]

    return await asyncio.gather(*(answer(question) for question in QUESTIONS))


def test_the_model_answers_and_exact_is_token_identical_to_mlx_lm(
    loaded: LoadedEngine, demo_model_path: Path
) -> None:
    """Three ragged rows decoded together, against mlx-lm alone on its own cache."""
    import mlx_lm

    got = asyncio.run(answers(loaded, 12))

    assert loaded.tokenizer.decode(got[0]).startswith("The capital of France is Paris.")
    if loaded.kv.policy == "exact":
        model, tokenizer = mlx_lm.load(str(demo_model_path))
        for question, tokens in zip(QUESTIONS, got, strict=True):
            assert tokens == stock_tokens(model, tokenizer, question, len(tokens))


def stock_tokens(model: Any, tokenizer: Any, question: str, count: int) -> list[int]:
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(prompt_of(tokenizer, question)), model, max_tokens=count)
    return [int(token) for token, _ in steps]


def test_bytes_per_token_are_as_the_readme_says(loaded: LoadedEngine) -> None:
    expected = {"exact": 46080.0 if loaded.model.device == "cpu" else 23040.0, "balanced": 9000.0}

    assert loaded.kv.bytes_per_token == expected[loaded.kv.policy]
    assert loaded.kv.bytes_per_token_fp16 == 23040
