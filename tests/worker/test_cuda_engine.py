"""The engine as on a Hopper GPU, its kernels executed by cudashim: what it loads, warms up and runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from daemon.worker.engine import LoadedEngine, start_engine
from daemon.worker.requests import GenerationRequest, Sampling
from tests.cudashim import shim
from tests.metalshim.needed import needs_shim
from tests.worker.specs import worker_spec
from tests.worker.tiny_model import write_tiny_model

pytestmark = needs_shim

REQUESTS = [
    GenerationRequest(
        tuple((seed * 31 + i * 7) % 300 + 2 for i in range(length)), max_tokens=tokens,
        sampling=Sampling(temperature=0), ignore_eos=True,
    )
    for seed, length, tokens in ((1, 5, 70), (2, 150, 30), (3, 60, 40))
]  # fmt: skip


def started(folder: Path, k: str) -> LoadedEngine:
    spec = worker_spec(max_concurrent=3, queue=2)
    kv = spec.kv.model_copy(update={"k": k, "strict": True})
    spec = spec.model_copy(update={"model_path": str(folder), "kv": kv})
    return start_engine(spec, progress=lambda *_: None, on_failure=lambda _: None)


async def answers(loaded: LoadedEngine) -> list[list[int]]:
    async def one(request: GenerationRequest) -> list[int]:
        return [event.token async for batch in loaded.engine.submit(request) for event in batch]

    return list(await asyncio.gather(*(one(request) for request in REQUESTS)))


@pytest.mark.parametrize(
    ("k", "kernels"),
    [("int8", {"fragments1", "fragments8", "fold"}), ("fp16", {"scan", "merge"})],
    ids=["rows together", "row by row"],
)
async def test_a_server_on_a_gpu_answers_by_its_kernels_and_compiles_nothing_once_it_is_ready(
    tmp_path: Path, k: str, kernels: set[str]
) -> None:
    folder = write_tiny_model(tmp_path / "tiny", head_dim=64)
    with shim.installed() as gpu:
        loaded = started(folder, k)
        warm = set(gpu.sources)
        got = await answers(loaded)
        loaded.engine.close()

    # which tokens they are is compared where no clock decides which rows go together (test_cuda_cache.py)
    assert [len(tokens) for tokens in got] == [request.max_tokens for request in REQUESTS]
    assert (loaded.kv.backend, loaded.kv.packing_backend) == ("cuda", "cuda")
    ran = {name.split("_")[1] for name, _ in gpu.launches}
    assert kernels <= ran
    assert gpu.sources == warm
