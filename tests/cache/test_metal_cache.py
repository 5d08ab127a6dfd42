"""The caches as they run on a Mac: Metal's kernels attend and encode, on a CPU emulation of Metal's language."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.kernels import attention
from daemon.kernels.attention import REFERENCE
from daemon.kernels.backend import Choice
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.policy.schemes import parse_scheme
from tests.cache.test_architectures import VOCAB, built
from tests.kernels.emulated_metal import emulated
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

HEADS, DIM = 2, 64
PROMPT, DECODED = 75, 12


def tokens(count: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    made = mx.random.normal((2, HEADS, count, DIM), key=mx.random.key(seed))
    return made[0], made[1]


def row(scheme: str, attends: Any = REFERENCE, **options: Any) -> Row:
    return Row(
        parse_scheme(scheme),
        **{"sink_tokens": 4, "tail_tokens": 32, "attention": attends, **options},
    )


def transform() -> KeyTransform:
    def rope(x: mx.array, offset: int) -> mx.array:
        return mx.fast.rope(x, 48, traditional=True, base=10_000.0, scale=1.0, offset=offset)

    scale = 1 + mx.random.uniform(shape=(HEADS, DIM), key=mx.random.key(5))
    return KeyTransform(
        scale, mx.random.normal((HEADS, DIM), key=mx.random.key(6)), Rotary(rope, DIM)
    )


def attended(one: Row, queries: mx.array) -> mx.array:
    out = one.attention.attend(
        queries, one.stored(), DIM**-0.5, one.mask(queries.shape[1], None), None
    )
    mx.eval(out)
    return out


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("turbo8v4", {}),
        ("turbo4v3", {"tail_tokens": 0}),
        ("turbo0v4", {"sink_tokens": 0}),
        ("turbo5v0", {"fold_tokens": 64}),
        ("turbo8v2", {"token_budget": 160}),
    ],
)
def test_a_row_attends_as_it_does_by_the_reference_while_it_grows(
    scheme: str, options: dict[str, Any]
) -> None:
    keys, values = tokens(300)
    queries = mx.random.normal((4, 300, DIM), key=mx.random.key(2))
    steps = [1, 30, 1, 1, 37, 1, 1, 8, 100, 3, 1, 32, 84]
    plain = row(scheme, keys=transform(), **options)
    with emulated() as settings:
        metal = row(scheme, attention.on_this_device(), keys=transform(), **options)
        at = 0
        for count in steps:
            for each in (plain, metal):
                each.append(keys[:, at : at + count], values[:, at : at + count])
            at += count
            newest = queries[:, at - count : at]
            expected = attended(plain, newest)

            difference = mx.max(mx.abs(attended(metal, newest) - expected))

            assert difference.item() < 2e-3 * mx.max(mx.abs(expected)).item(), at

    assert at == 300
    ran = {name for name, _ in settings.launches}
    assert ran == {"tqd_turn", "tqd_attend", "tqd_merge", "tqd_encode", "tqd_restore"}


def test_rows_of_any_length_form_a_batch() -> None:
    lengths = (1, 40, 133)
    queries = mx.random.normal((3, 4, 1, DIM), key=mx.random.key(3))
    outs = []
    with emulated():
        for attends in (REFERENCE, attention.on_this_device()):
            rows = [row("turbo4v4", attends) for _ in lengths]
            for each, length in zip(rows, lengths, strict=True):
                each.append(*(part[:, : length - 1] for part in tokens(length)))
            batch = BatchCache(rows)
            newest = [tokens(length)[0][:, -1:] for length in lengths]
            batch.update_and_fetch(mx.stack(newest), mx.stack(newest))
            outs.append(np.array(batch.attend(queries, DIM**-0.5, None, None)))

    np.testing.assert_allclose(outs[1], outs[0], atol=2e-3)


def test_empty_and_padded_rows_of_a_batch_are_as_alone() -> None:
    """An empty row gets nothing but padding, and zeros; the padding of the others is zeros too."""
    lengths, new = (0, 1, 31, 32, 33, 70), (0, 4, 1, 3, 4, 2)
    keys, values = (
        mx.random.normal((6, HEADS, 4, DIM), key=mx.random.key(seed)) for seed in (4, 5)
    )
    queries = mx.random.normal((6, 4, 4, DIM), key=mx.random.key(6))
    with emulated():
        rows = [row("turbo4v4", attention.on_this_device()) for _ in lengths]
        for each, length in zip(rows, lengths, strict=True):
            if length:
                each.append(*tokens(length))
        alone = [SequenceCache(each.copy()) for each in rows]
        batch = BatchCache(rows)
        batch.prepare(lengths=list(new), right_padding=[4 - count for count in new])
        batch.update_and_fetch(keys, values)
        got = batch.attend(queries, DIM**-0.5, "causal", None)
        mx.eval(got)

        for at, count in enumerate(new):
            assert mx.all(got[at, :, count:] == 0).item()
            if count:
                one = slice(at, at + 1)
                alone[at].update_and_fetch(keys[one, :, :count], values[one, :, :count])
                expected = alone[at].attend(queries[one, :, :count], DIM**-0.5, "causal", None)
                assert mx.allclose(got[one, :, :count], expected, atol=1e-6).item(), lengths[at]


def greedy(model: Any, caches: list[Any]) -> list[int]:
    prompt = (mx.arange(PROMPT)[None] * 7919 + 11) % VOCAB
    found = []
    for _ in range(DECODED):
        logits = model(prompt, cache=caches)[0, -1, :VOCAB]
        found.append(int(mx.argmax(logits).item()))
        prompt = mx.array([found[-1:]])
    return found


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("llama", mx.float16, {"head_dim": 64}),
        ("qwen2", mx.bfloat16, {"hidden_size": 256}),
        ("gpt_oss", mx.float32, {"head_dim": 64}),
    ],
)
def test_a_model_decodes_the_same_tokens(
    family: str, dtype: mx.Dtype, changes: dict[str, int]
) -> None:
    """Also with key biases, and with learned sinks beside sliding layers."""
    model = built(family, dtype, **changes)
    expected = greedy(model.model, model.factory())

    with emulated() as settings:
        device = attention.on_this_device()
        got = greedy(model.model, model.factory.attended_by(device)())

    assert got == expected
    assert len(settings.launches) > DECODED
    assert set(device._choices.values()) == {Choice("metal")}
