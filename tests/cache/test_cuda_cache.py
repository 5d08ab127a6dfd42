"""The caches as they run on a Hopper GPU: CUDA's kernels attend, encode, step and fold, on cudashim."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step

from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.kernels import attention
from daemon.kernels.attention import REFERENCE
from daemon.kernels.backend import Choice
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.policy.schemes import parse_scheme
from tests.cache.test_architectures import VOCAB, built
from tests.cudashim import shim
from tests.cudashim.shim import Settings
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

HEADS, DIM = 2, 64
SCALE = DIM**-0.5


def transform() -> KeyTransform:
    def rope(x: mx.array, offset: int) -> mx.array:
        return mx.fast.rope(x, DIM, traditional=False, base=10_000.0, scale=1.0, offset=offset)

    scale = 1 + mx.random.uniform(shape=(HEADS, DIM), key=mx.random.key(5))
    mean = mx.random.normal((HEADS, DIM), key=mx.random.key(6))
    return KeyTransform(scale, mean, Rotary(rope, DIM))


def tokens(rows: int, count: int, seed: int) -> tuple[mx.array, mx.array]:
    made = mx.random.normal((2, rows, HEADS, count, DIM), key=mx.random.key(seed))
    return made[0].astype(mx.float16), made[1].astype(mx.float16)


class Pair:
    """A batch on the emulated GPU, and the same rows by themselves on the reference."""

    def __init__(self, scheme: str) -> None:
        self._scheme, self._keys = scheme, transform()
        self._device = attention.on_this_device()
        self.batch = BatchCache([])
        self.alone: list[Row] = []
        self._seed = 0

    def _row(self, attends: Any) -> Row:
        return Row(
            parse_scheme(self._scheme), sink_tokens=4, tail_tokens=32, attention=attends,
            keys=self._keys, statistics_id="s",
        )  # fmt: skip

    def extend(self, length: int) -> None:
        mine, theirs = self._row(REFERENCE), SequenceCache(self._row(self._device))
        keys, values = tokens(1, length, 100 + length)
        mine.append(keys[0], values[0])
        theirs.update_and_fetch(keys, values)
        self.batch.extend(SequenceCache.merge([theirs]))
        self.alone.append(mine)

    def filter(self, keep: list[int]) -> None:
        self.batch.filter(keep)
        self.alone = [self.alone[index] for index in keep]

    def step(self) -> None:
        """One token a row; what each attends to is as near as the kernels promise."""
        self._seed += 1
        keys, values = tokens(len(self.alone), 1, self._seed)
        queries = mx.random.normal((len(self.alone), 4, 1, DIM), key=mx.random.key(self._seed))
        queries = queries.astype(mx.float16)
        self.batch.update_and_fetch(keys, values)
        got = np.array(self.batch.attend(queries, SCALE, None, None).astype(mx.float32))
        for index, mine in enumerate(self.alone):
            mine.append(keys[index], values[index])
            alone = SequenceCache(mine)
            want = np.array(alone.attend(queries[index : index + 1], SCALE, None, None)[0])
            np.testing.assert_allclose(got[index], want, atol=4e-3 * np.abs(want).max())


def assert_chosen_alike(got: list[int], steps: list[tuple[int, mx.array]]) -> None:
    """Up to the first token of which the reference finds another as good, to what the kernels promise."""
    for token, (best, logprobs) in zip(got, steps, strict=True):
        if token != best:
            assert (logprobs[best] - logprobs[token]).item() < 0.05
            return


@pytest.fixture
def gpu() -> Any:
    with shim.installed() as settings:
        yield settings


@pytest.mark.parametrize("scheme", ["turbo4v4", "turbo8v3"])
def test_rows_that_come_go_and_fold_are_each_as_if_alone(gpu: Settings, scheme: str) -> None:
    pair = Pair(scheme)
    for length in (7, 40, 300):
        pair.extend(length)
    for _ in range(40):
        pair.step()
    pair.filter([0, 2])
    pair.extend(100)
    gpu.launches.clear()
    for _ in range(36):
        pair.step()

    ran = Counter(name.split("_")[1] for name, _ in gpu.launches)
    assert ran["fragments8"] == 36  # one node a step, whatever the lengths
    assert ran["fold"] >= 2
    assert "scan" not in ran


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("llama", mx.float16, {"head_dim": 64}),
        ("qwen2", mx.bfloat16, {"hidden_size": 256}),
        ("gpt_oss", mx.float32, {"head_dim": 64}),
    ],
)
def test_a_served_batch_of_a_model_has_the_tokens_of_the_reference(
    gpu: Settings,
    family: str,
    dtype: mx.Dtype,
    changes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with key biases, and with learned sinks beside sliding layers; a second prompt comes while the first decodes."""
    model = built(family, dtype, **changes)
    prompts, counts = (
        [[(7 * i + 11 * j) % VOCAB for j in range(n)] for i, n in ((0, 75), (1, 40))],
        (30, 20),
    )

    def alone(prompt: list[int], count: int) -> list[tuple[int, mx.array]]:
        steps = generate_step(
            mx.array(prompt), model.model, max_tokens=count, prompt_cache=model.factory()
        )
        return [(int(token), logprobs) for token, logprobs in steps]

    expected = [alone(*each) for each in zip(prompts, counts, strict=True)]
    device = attention.on_this_device()
    factory = model.factory.attended_by(device)
    monkeypatch.setattr(model.model, "make_cache", factory, raising=False)
    generator = BatchGenerator(model.model, stream=mx.default_stream(mx.cpu))
    got: dict[int, list[int]] = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            for response in generator.next()[1]:
                got.setdefault(response.uid, []).append(response.token)

    uids = generator.insert(prompts[:1], max_tokens=[counts[0]])
    run(6)
    uids += generator.insert(prompts[1:], max_tokens=[counts[1]])
    run(40)

    assert [len(got[uid]) for uid in uids] == list(counts)
    for uid, steps in zip(uids, expected, strict=True):
        assert_chosen_alike(got[uid], steps)
    assert set(device._choices.values()) == {Choice("cuda")}
