"""Attention over packed latents against the same attention over plain ones."""

from __future__ import annotations

import mlx.core as mx
import pytest

from daemon.cache.row import Row
from daemon.kernels import latent
from daemon.kernels.stored import Stored
from daemon.policy.schemes import FP16, INT8, Codec, Scheme

HEADS = 3


def stored(codec: Codec, tokens: int, dim: int, *, sinks: int = 4, tail: int = 32) -> Stored:
    row = Row(Scheme(codec, FP16), sink_tokens=sinks, tail_tokens=tail)
    vectors = mx.random.normal((1, tokens, dim), key=mx.random.key(1))
    row.append(vectors, mx.zeros((1, tokens, 8)))
    row.pack()
    return row.stored()


@pytest.mark.parametrize("dim", [24, 32, 48, 100, 512])
@pytest.mark.parametrize(
    ("tokens", "sinks", "tail"), [(3, 4, 32), (40, 4, 32), (131, 4, 32), (70, 0, 0)]
)
def test_one_query_attends_as_to_the_dense_latents(
    dim: int, tokens: int, sinks: int, tail: int
) -> None:
    """What is read packed and what is handed out plain are the same numbers."""
    packed = stored(INT8, tokens, dim, sinks=sinks, tail=tail)
    queries = mx.random.normal((HEADS, 1, dim), key=mx.random.key(2))
    bias = mx.random.normal((HEADS, 1, tokens), key=mx.random.key(3))

    got = latent.attend(queries, packed, 0.2, bias)

    plain = latent.dense(packed, mx.float32)
    weights = mx.softmax(queries @ plain.swapaxes(-1, -2) * 0.2 + bias, axis=-1)
    assert plain.shape == (1, tokens, dim)
    assert mx.allclose(got, weights @ plain, atol=2e-5)


def test_int8_latents_are_near_the_ones_stored() -> None:
    exact, packed = (latent.dense(stored(codec, 200, 512), mx.float32) for codec in (FP16, INT8))

    error = mx.linalg.norm(packed - exact) / mx.linalg.norm(exact)
    assert 0 < error.item() < 0.012
    assert mx.array_equal(packed[:, :4], exact[:, :4])  # sinks
    assert mx.array_equal(packed[:, -32:], exact[:, -32:])  # tail


def test_masked_tokens_have_no_weight() -> None:
    packed = stored(INT8, 80, 32)
    queries = mx.random.normal((HEADS, 1, 32), key=mx.random.key(2))
    only_last = mx.where(mx.arange(80) == 79, 0.0, mx.finfo(mx.float32).min)

    got = latent.attend(queries, packed, 1.0, mx.broadcast_to(only_last, (HEADS, 1, 80)))

    last = latent.dense(packed, mx.float32)[0, -1]
    assert mx.allclose(got[:, 0], mx.broadcast_to(last, (HEADS, 32)), atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_output_has_the_dtype_of_the_queries(dtype: mx.Dtype) -> None:
    queries = mx.ones((HEADS, 1, 32), dtype)
    assert latent.attend(queries, stored(INT8, 80, 32), 1.0, None).dtype == dtype


def test_several_queries_or_learned_sinks_are_refused() -> None:
    packed = stored(INT8, 80, 32)
    with pytest.raises(ValueError, match="one query token"):
        latent.attend(mx.zeros((HEADS, 2, 32)), packed, 1.0, None)
    with pytest.raises(ValueError, match="without learned sinks"):
        latent.attend(mx.zeros((HEADS, 1, 32)), packed, 1.0, None, mx.zeros(HEADS))
