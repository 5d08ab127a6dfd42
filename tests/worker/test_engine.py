"""The real engine on a tiny model: one MLX thread, continuous batching, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from daemon.config.wire import WorkerSpec
from daemon.errors import WorkerExit, WorkerExitError
from daemon.worker import scheduler
from daemon.worker.engine import LoadedEngine, start_engine
from daemon.worker.requests import (
    EngineFailedError,
    EngineStats,
    GenerationRequest,
    QueueFullError,
    Sampling,
    TokenEvent,
)
from tests.worker.specs import worker_spec
from tests.worker.tiny_model import write_tiny_model

GREEDY = Sampling(temperature=0)


def spec_for(folder: Path, **server: Any) -> WorkerSpec:
    return worker_spec(**{"max_concurrent": 3, "queue": 2, **server}).model_copy(
        update={"model_path": str(folder)}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[LoadedEngine]:
    failures: list[BaseException] = []
    running = start_engine(spec_for(folder), progress=lambda *_: None, on_failure=failures.append)
    yield running
    running.close()
    assert failures == []


async def tokens_of(loaded: LoadedEngine, request: GenerationRequest) -> list[TokenEvent]:
    return [event async for batch in loaded.engine.submit(request) for event in batch]


def request(seed: int = 0, length: int = 40, **changes: Any) -> GenerationRequest:
    prompt = tuple((seed * 31 + i * 7) % 300 + 2 for i in range(length))
    return replace(
        GenerationRequest(prompt, max_tokens=12, sampling=GREEDY, ignore_eos=True), **changes
    )


async def test_rows_of_a_batch_get_the_tokens_they_get_alone(loaded: LoadedEngine) -> None:
    requests = [request(seed, length) for seed, length in ((1, 5), (2, 150), (3, 60))]
    alone = [await tokens_of(loaded, one) for one in requests]

    together = await asyncio.gather(*(tokens_of(loaded, one) for one in requests))

    assert together == alone
    assert [events[-1].finish for events in together] == ["length"] * 3


async def test_timing_a_fold_changes_no_token_and_the_time_grows(loaded: LoadedEngine) -> None:
    long = replace(request(4, 150), max_tokens=80)
    answers = [await tokens_of(loaded, long) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    await until(lambda: loaded.engine.stats().running == 0)
    spent_s = loaded.engine.stats().packing_s or 0.0
    assert spent_s > 0
    await tokens_of(loaded, long)
    await until(lambda: (loaded.engine.stats().packing_s or 0.0) > spent_s)


async def test_whoever_has_an_answer_finds_all_of_it_counted(loaded: LoadedEngine) -> None:
    """A snapshot that counts an answer, but not yet its tokens or its time in the line, adds up to nothing."""

    def counted(stats: EngineStats) -> tuple[int, int, int]:
        return (
            stats.prompt_tokens_total,
            stats.generation_tokens_total,
            sum(stats.queue_time_s.counts if stats.queue_time_s else ()),
        )

    before = counted(await settled(loaded))
    for answers in range(1, 31):  # faster than numbers are published by the clock
        await tokens_of(loaded, request(answers, length=5, max_tokens=2))
        grown = [
            now - then for now, then in zip(counted(loaded.engine.stats()), before, strict=True)
        ]
        assert grown == [5 * answers, 2 * answers, answers]


async def test_more_requests_than_rows_wait_their_turn(loaded: LoadedEngine) -> None:
    results = await asyncio.gather(*(tokens_of(loaded, request(seed)) for seed in range(5)))

    assert all(len(events) == 12 for events in results)


async def test_a_full_line_refuses_with_a_time_to_come_back(loaded: LoadedEngine) -> None:
    open_now = [loaded.engine.submit(request(seed, max_tokens=400)) for seed in range(5)]

    with pytest.raises(QueueFullError) as refusal:
        loaded.engine.submit(request())

    assert 1 <= refusal.value.retry_after_s <= 30
    for generation in open_now:
        generation.abort()
    await until(lambda: loaded.engine.stats().running == 0)
    assert len(await tokens_of(loaded, request())) == 12


async def test_abort_frees_the_row_and_its_memory(loaded: LoadedEngine) -> None:
    generation = loaded.engine.submit(request(max_tokens=400))
    async for _ in generation:
        break

    generation.abort()
    generation.abort()

    await until(lambda: loaded.engine.stats().running == 0)
    await until(lambda: loaded.engine.stats().kv_bytes == 0)


async def test_a_stop_token_ends_with_stop_unless_ignored(loaded: LoadedEngine) -> None:
    forced = Sampling(temperature=0, logit_bias=((1, 100.0),))

    stopped = await tokens_of(loaded, request(sampling=forced, ignore_eos=False))
    ignored = await tokens_of(loaded, request(sampling=forced, ignore_eos=True, max_tokens=3))

    assert [(event.token, event.finish) for event in stopped] == [(1, "stop")]
    assert [(event.token, event.finish) for event in ignored] == [
        (1, None),
        (1, None),
        (1, "length"),
    ]


async def test_a_seed_gives_the_same_tokens_alone_and_beside_others(loaded: LoadedEngine) -> None:
    seeded = request(sampling=Sampling(temperature=1.5, seed=99))
    alone = await tokens_of(loaded, seeded)

    beside = await asyncio.gather(
        tokens_of(loaded, seeded), tokens_of(loaded, request(5, sampling=Sampling(temperature=1.5)))
    )

    assert beside[0] == alone
    assert (
        await tokens_of(loaded, replace(seeded, sampling=Sampling(temperature=1.5, seed=98)))
        != alone
    )


async def test_logprobs_are_those_of_the_sampled_token_and_of_the_best(
    loaded: LoadedEngine,
) -> None:
    events = await tokens_of(loaded, request(top_logprobs=3))

    for event in events:
        assert event.logprob is not None
        assert event.logprob <= 0
        assert len(event.top) == 3
        assert event.top[0] == (event.token, pytest.approx(event.logprob))
        assert sum(2.718281828**value for _, value in event.top) <= 1.001
    assert (await tokens_of(loaded, request(top_logprobs=0)))[0].top == ()
    assert (await tokens_of(loaded, request()))[0].logprob is None


async def test_the_loop_counts_its_passes_idle_or_not(loaded: LoadedEngine) -> None:
    before = loaded.engine.stats().generation

    await until(lambda: loaded.engine.stats().generation > before + 1)
    await tokens_of(loaded, request())

    assert loaded.engine.stats().generation > before + 10


async def test_raised_limits_admit_more(loaded: LoadedEngine) -> None:
    loaded.engine.set_limits(
        max_concurrent=6, queue=0, kv_limit_bytes=None, memory_limit_bytes=None
    )
    try:
        open_now = [loaded.engine.submit(request(seed, max_tokens=300)) for seed in range(6)]
        await until(lambda: loaded.engine.stats().running == 6)
        for generation in open_now:
            generation.abort()
        await until(lambda: loaded.engine.stats().running == 0)
    finally:
        loaded.engine.set_limits(
            max_concurrent=3, queue=2, kv_limit_bytes=None, memory_limit_bytes=None
        )


async def test_mlx_runs_on_one_thread_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams belong to threads: an evaluation elsewhere fails at the worst moment on a GPU."""
    seen: set[str] = set()
    evaluate, evaluate_async = mx.eval, mx.async_eval

    def watched(*arguments: Any) -> None:
        seen.add(threading.current_thread().name)
        evaluate(*arguments)

    def watched_async(*arguments: Any) -> None:
        seen.add(threading.current_thread().name)
        evaluate_async(*arguments)

    monkeypatch.setattr(mx, "eval", watched)
    monkeypatch.setattr(mx, "async_eval", watched_async)
    running = await asyncio.to_thread(
        start_engine, spec_for(folder), progress=lambda *_: None, on_failure=lambda _: None
    )
    await asyncio.gather(*(tokens_of(running, request(seed)) for seed in range(4)))
    await asyncio.to_thread(running.close)

    assert seen == {"mlx"}


async def test_an_exception_in_the_loop_fails_every_open_generation_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[BaseException] = []
    running = await asyncio.to_thread(
        start_engine, spec_for(folder), progress=lambda *_: None, on_failure=failures.append
    )

    def broken(*_: object) -> None:
        raise ArithmeticError("the step broke")

    generations = [running.engine.submit(request(seed, max_tokens=400)) for seed in range(4)]
    monkeypatch.setattr(scheduler, "_event", broken)

    for generation in generations:
        with pytest.raises(EngineFailedError):
            async for _ in generation:
                pass
    with pytest.raises(EngineFailedError):
        running.engine.submit(request())
    await until(lambda: bool(failures))
    assert [str(error) for error in failures] == ["the step broke"]


def test_progress_never_goes_back(folder: Path) -> None:
    seen: list[float] = []

    running = start_engine(
        spec_for(folder),
        progress=lambda _, fraction: seen.append(fraction),
        on_failure=lambda _: None,
    )
    running.close()

    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert 0.9 <= seen[-1] <= 1.0


def test_reports_say_what_was_built(loaded: LoadedEngine) -> None:
    assert loaded.kv.summary == "turbo8v4 on 3 of 3 layers"
    assert loaded.kv.effective == {"turbo8v4": 3}
    assert loaded.kv.bytes_per_token == 3 * 2 * (32 * 12 + 32) / 8
    assert loaded.kv.bytes_per_token_fp16 == 3 * 2 * 32 * 2 * 2
    assert (loaded.model.layers, loaded.max_context, loaded.vocab_size) == (3, 512, 320)
    assert loaded.eos_token_ids == {1}


def test_max_context_is_lowered_but_never_raised(folder: Path) -> None:
    for wanted, expected in ((100, 100), (100_000, 512)):
        running = start_engine(
            spec_for(folder, max_context=wanted),
            progress=lambda *_: None,
            on_failure=lambda _: None,
        )
        running.close()

        assert running.max_context == expected


def remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


def rewrite(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (remove("config.json"), WorkerExit.MODEL_MISSING, "config.json is missing"),
        (remove("model.safetensors"), WorkerExit.MODEL_MISSING, "has no weights"),
        (truncate_weights, WorkerExit.BAD_CONFIG, "mlx-lm cannot load"),
        (rewrite("config.json", "{"), WorkerExit.BAD_CONFIG, "cannot read"),
        (rewrite("config.json", "[]"), WorkerExit.BAD_CONFIG, "does not hold a JSON object"),
        (
            rewrite("config.json", '{"model_type": "unheard_of"}'),
            WorkerExit.BAD_CONFIG,
            "unheard_of",
        ),
        (rewrite("tokenizer.json", "{"), WorkerExit.BAD_CONFIG, "cannot load the tokenizer"),
    ],
)
def test_a_damaged_model_folder_is_refused_with_its_reason(
    tmp_path: Path, damage: Any, code: WorkerExit, message: str
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    damage(folder)

    with pytest.raises(WorkerExitError) as refusal:
        start_engine(spec_for(folder), progress=lambda *_: None, on_failure=lambda _: None)

    assert refusal.value.code is code
    assert message in refusal.value.message


async def settled(loaded: LoadedEngine) -> EngineStats:
    """Return the numbers once the loop has passed with nothing to do."""
    seen = loaded.engine.stats().generation
    await until(
        lambda: loaded.engine.stats().generation > seen + 1 and not loaded.engine.stats().running
    )
    return loaded.engine.stats()


async def until(condition: Any) -> None:
    """Wait for *condition*, half a minute at most."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never came true")
