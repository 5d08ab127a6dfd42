"""Head lengths, dtypes and sizes of numbers that real models have, on small models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.kernels import reference
from daemon.kernels.attention import on_this_device
from daemon.kernels.case import Attend
from daemon.kernels.rotation import unrotate
from daemon.policy.schemes import parse_scheme
from tests.cache.test_architectures import alive, built, distance, logits
from tests.tiny_llama import tiny_llama

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
# Without experts: MLX has no matrix product of gathered matrices in half precision on a CPU.
SAMPLE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"first_k_dense_replace": 6},
    "deepseek_v3": {"first_k_dense_replace": 6},
    "falcon_h1": {},
    "gemma3_text": {},
    "lfm2": {},
    "llama": {},
    "mimo_v2_flash": {"moe_layer_freq": [0] * 6},
}


@pytest.mark.parametrize("family", SAMPLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_weights_give_close_and_finite_logits(family: str, dtype: str) -> None:
    one = built(family, DTYPES[dtype], **SAMPLE[family])
    assert one.factory.any_packed

    unpacked, packed = (
        logits(one.model, caches) for caches in (one.factory.unpacked(), one.factory())
    )

    assert mx.all(mx.isfinite(packed)).item()
    assert distance(unpacked, one.exact) < (0.02 if dtype == "float16" else 0.1)
    assert 1e-6 < distance(packed, one.exact) < 0.3


@pytest.mark.parametrize("head_dim", [64, 80, 96, 100, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("scheme", ["turbo8v4", "turbo4v3"])
def test_every_head_dim_is_served(head_dim: int, scheme: str) -> None:
    """80, 96, 112 and 192 have Hadamard matrices of their own; 100 has none."""
    model = tiny_llama(
        5,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=64,
        head_dim=head_dim,
        vocab_size=96,
    )
    model.update({"model": {"norm": {"weight": alive(mx.zeros(64), mx.float32)}}})
    caches = {
        name: [
            SequenceCache(Row(parse_scheme(name), sink_tokens=4, tail_tokens=32))
            for _ in model.layers
        ]
        for name in ("fp16", scheme)
    }

    exact, packed = (logits(model, made) for made in caches.values())

    assert 1e-5 < distance(packed, exact) < (0.05 if scheme == "turbo8v4" else 0.2)


def caches_of(scheme: str, keys: mx.array, values: mx.array) -> SequenceCache:
    cache = SequenceCache(Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=32))
    cache.update_and_fetch(keys, values)
    cache.row.pack()
    return cache


@pytest.mark.parametrize(
    "scheme", ["int8", "turbo0v4", "turbo8v3", "turbo3tv3t", "turbo4v4", "turbo3.5v3.5", "turbo5v2"]
)
@pytest.mark.parametrize("dims", [(192, 128), (24, 16), (64, 16)])
def test_values_may_be_shorter_than_keys(scheme: str, dims: tuple[int, int]) -> None:
    keys, values = (mx.random.normal((1, 2, 100, dim), key=mx.random.key(dim)) for dim in dims)
    queries = mx.random.normal((1, 4, 1, dims[0]), key=mx.random.key(7))

    got = caches_of(scheme, keys, values).attend(queries, dims[0] ** -0.5, None, None)

    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=dims[0] ** -0.5)
    assert got.shape == (1, 4, 1, dims[1])
    fewest = min(parse_scheme(scheme).k.bits, parse_scheme(scheme).v.bits)
    assert 0 < distance(got, expected) < {8: 0.02, 4: 0.2, 3.5: 0.28, 3: 0.35, 2: 0.6}[fewest]


@pytest.mark.parametrize("scheme", ["int8", "turbo8v4", "turbo4v4", "turbo2v2"])
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_numbers_beyond_the_range_of_half_precision_stay_finite(
    scheme: str, queries: int, dtype: mx.Dtype
) -> None:
    """Outliers of 10⁵ in one channel: more than a float16, which only scales are, can hold."""
    keys = mx.random.normal((1, 2, 100, 64), key=mx.random.key(1))
    keys = mx.where(mx.arange(64) == 5, 1e5, keys).astype(dtype)
    asked = mx.random.normal((1, 4, queries, 64), key=mx.random.key(2)).astype(dtype)

    got = caches_of(scheme, keys, keys).attend(asked, 1e-6, None, None)

    assert mx.all(mx.isfinite(got)).item()
    assert mx.all(mx.abs(got[..., 5].astype(mx.float32) / 1e5 - 1) < 0.25).item()


@pytest.mark.parametrize("scheme", ["int8", "turbo4v4"])
@pytest.mark.parametrize("queries", [1, 20])
def test_the_largest_half_precision_outlier_stays_finite(scheme: str, queries: int) -> None:
    keys = mx.random.normal((1, 2, 100, 64), key=mx.random.key(1))
    keys = mx.where(mx.arange(64) == 5, 60000.0, keys).astype(mx.float16)
    asked = mx.random.normal((1, 4, queries, 64), key=mx.random.key(2)).astype(mx.float16)

    got = caches_of(scheme, keys, keys).attend(asked, 1e-6, None, None)

    assert mx.all(mx.isfinite(got)).item()


@pytest.mark.parametrize("scheme", ["int8", "turbo4v4", "turbo0v4"])
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("attention", [reference, on_this_device()], ids=["reference", "device"])
def test_what_a_rotation_gathers_in_one_coordinate_stays_finite(
    scheme: str, queries: int, attention: Attend
) -> None:
    """The vector whose rotation is 60000·√64 times a unit vector: each of its own values is ±60000."""
    gathered = {side: unrotate(8 * 60000.0 * mx.eye(64)[5], side) for side in ("k", "v")}
    keys, values = (
        mx.broadcast_to(gathered[side].astype(mx.float16), (1, 2, 100, 64)) for side in ("k", "v")
    )
    cache = caches_of(scheme, keys, values)
    cache.row.attention = attention
    asked = mx.random.normal((1, 4, queries, 64), key=mx.random.key(2)).astype(mx.float16)

    got = cache.attend(asked, 1e-6, None, None)

    assert mx.all(mx.isfinite(got)).item()
    if scheme == "int8":  # a codebook has no centroid that far out
        expected = mx.broadcast_to(values[:, :1, :1], got.shape).astype(mx.float32)
        assert mx.allclose(got.astype(mx.float32), expected, rtol=0.02).item()
