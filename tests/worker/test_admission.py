"""Who may run by memory: the arithmetic, then the real engine on a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from daemon.config.spec import ServerSpec
from daemon.config.wire import WorkerSpec
from daemon.policy.claim import PREFILL_CHUNK, PROCESS_BYTES
from daemon.policy.spec import KvSpec
from daemon.worker.admission import Costs, kv_limit
from daemon.worker.engine import LoadedEngine, start_engine
from daemon.worker.requests import GenerationRequest, QueueFullError, Sampling, TooLargeError
from tests.worker.specs import worker_spec
from tests.worker.tiny_model import write_tiny_model

MIB = 2**20
GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize(
    ("budget", "share", "limit"),
    [
        ("auto", 100, 60),  # less 30 in reserve and 10 of weights
        ("auto", None, None),  # nobody counts
        ("auto", 20, 0),
        ("none", 100, None),
        (50, 100, 50),
        (70, 100, 60),  # no more than the share leaves
        (70, None, 70),
    ],
)
def test_caches_get_what_the_share_leaves_or_the_budget_if_that_is_less(
    budget: str | int, share: int | None, limit: int | None
) -> None:
    server = ServerSpec(model="m", port=1, kv=KvSpec(budget=budget))
    assert kv_limit(server, share_bytes=share, reserve_bytes=30, weights_bytes=10) == limit


def test_padded_sequences_are_all_as_long_as_the_longest() -> None:
    rows, padded = (Costs(lambda tokens: 10 * tokens, padded=it, reading_tokens=100) for it in (False, True))  # fmt: skip
    assert (rows.total_bytes([1, 2, 7]), padded.total_bytes([1, 2, 7])) == (100, 210)
    assert (rows.total_bytes([]), padded.total_bytes([])) == (0, 0)


def test_prompts_are_read_together_up_to_one_context() -> None:
    rows, padded = (Costs(lambda tokens: tokens, padded=it, reading_tokens=100) for it in (False, True))  # fmt: skip
    assert rows.can_read([60, 30])
    assert not padded.can_read([60, 30])
    assert not rows.can_read([60, 41])
    assert rows.can_read([500])  # alone


def spec_for(folder: Path, **update: object) -> WorkerSpec:
    spec = worker_spec(max_concurrent=3, queue=1)
    return spec.model_copy(update={"model_path": str(folder), **update})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def limits() -> Iterator[None]:
    """Put MLX's limits back, which belong to the process."""
    memory, cache = mx.set_memory_limit(2**40), mx.set_cache_limit(0)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.fixture(scope="module")
def loaded(folder: Path, limits: None) -> Iterator[LoadedEngine]:
    share, reserve = 900 * MIB, PROCESS_BYTES + 64 * MIB
    spec = spec_for(folder, memory_limit_bytes=share, memory_reserve_bytes=reserve)
    failures: list[BaseException] = []
    running = start_engine(spec, progress=lambda *_: None, on_failure=failures.append)
    assert mx.get_memory_limit() == share
    yield running
    running.close()
    assert failures == []


def request(length: int = 40, max_tokens: int = 12) -> GenerationRequest:
    prompt = tuple((i * 7) % 300 + 2 for i in range(length))
    return GenerationRequest(prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True)


def limit_to(loaded: LoadedEngine, *, sequences: float, tokens: int) -> int:
    """Let caches take so many sequences of *tokens*; return the limit."""
    costs = loaded.engine._costs
    assert costs is not None
    limit = int(costs.sequence_bytes(tokens) * sequences)
    loaded.engine.set_limits(
        max_concurrent=3, queue=1, kv_limit_bytes=limit, memory_limit_bytes=800 * MIB
    )
    return limit


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine's thread has no event to wait for
            await asyncio.sleep(0.02)


async def test_mlx_is_kept_to_the_share_and_follows_it_live(loaded: LoadedEngine) -> None:
    assert mx.set_cache_limit(32 * MIB) == 32 * MIB  # half of what is in reserve for reading
    limit_to(loaded, sequences=1, tokens=256)
    await until(lambda: mx.get_memory_limit() == 800 * MIB)


async def test_a_request_waits_until_what_runs_leaves_room(loaded: LoadedEngine) -> None:
    limit = limit_to(loaded, sequences=1.5, tokens=256)
    await until(lambda: loaded.engine.stats().kv_limit_bytes == limit)
    most = 0
    generations = [loaded.engine.submit(request(max_tokens=60)) for _ in range(3)]

    async def read(generation: object) -> int:
        nonlocal most
        count = 0
        async for batch in generation:  # type: ignore[attr-defined]  # an MlxGeneration
            count += len(batch)
            stats = loaded.engine.stats()
            most = max(most, stats.running)
            assert stats.kv_reserved_bytes <= limit
        return count

    assert await asyncio.gather(*map(read, generations)) == [60, 60, 60]
    assert most == 1
    await until(lambda: loaded.engine.stats().kv_reserved_bytes == 0)


async def test_a_request_that_can_never_fit_is_refused_at_once(loaded: LoadedEngine) -> None:
    limit = limit_to(loaded, sequences=1, tokens=256)
    with pytest.raises(TooLargeError) as refusal:
        loaded.engine.submit(request(max_tokens=400))
    assert refusal.value.tokens == 440
    assert refusal.value.needed_bytes > limit == refusal.value.limit_bytes
    assert loaded.engine.stats().running == 0


async def test_a_full_line_says_that_it_waits_for_memory(loaded: LoadedEngine) -> None:
    limit = limit_to(loaded, sequences=1.5, tokens=512)
    await until(lambda: loaded.engine.stats().kv_limit_bytes == limit)
    running = [loaded.engine.submit(request(max_tokens=450)) for _ in range(2)]
    await until(lambda: loaded.engine.stats().waiting == 1)
    running += [loaded.engine.submit(request(max_tokens=450)) for _ in range(2)]
    with pytest.raises(QueueFullError) as refusal:
        loaded.engine.submit(request())
    assert refusal.value.for_memory
    for generation in running:
        generation.abort()
    await until(lambda: loaded.engine.stats().running == 0)


async def test_a_lower_limit_takes_nothing_from_what_runs(loaded: LoadedEngine) -> None:
    limit_to(loaded, sequences=3, tokens=512)
    first, second = (loaded.engine.submit(request(max_tokens=400)) for _ in range(2))
    await until(lambda: loaded.engine.stats().running == 2)
    limit = limit_to(loaded, sequences=1, tokens=512)
    await until(lambda: loaded.engine.stats().kv_limit_bytes == limit)
    stats = loaded.engine.stats()
    assert stats.running == 2
    assert stats.kv_reserved_bytes > limit
    for generation in (first, second):
        assert sum([len(batch) async for batch in generation]) == 400


async def test_what_is_set_aside_bounds_what_is_allocated(loaded: LoadedEngine) -> None:
    costs = loaded.engine._costs
    assert costs is not None
    limit_to(loaded, sequences=3, tokens=512)
    most = 0
    async for _ in loaded.engine.submit(request(length=200, max_tokens=200)):
        most = max(most, loaded.engine.stats().kv_bytes)
    # a chunk that was read and not yet packed is in the reserve
    chunk = PREFILL_CHUNK["cpu"] * 2 * loaded.kv.bytes_per_token_fp16  # float32
    assert 0 < most <= costs.sequence_bytes(400) + chunk
