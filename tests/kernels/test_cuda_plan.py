"""What the CUDA kernels are asked to do: decided without a device."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from daemon.kernels import order
from daemon.kernels.case import Case
from daemon.kernels.cuda import angles, launch, plan, sources
from daemon.kernels.cuda.layer import layer_of
from daemon.kernels.keys import KeyTransform, Rotary
from daemon.kernels.packing import TileLayout
from daemon.kernels.stepping import Span
from daemon.policy.schemes import (
    AFFINE8,
    FP16,
    INT8,
    TURBO2,
    TURBO4,
    TURBO5,
    Codec,
)

MOST_SHARED = 232_448  # bytes of a block on compute capability 9.0
FAST_TEXT = sources.fast_text({}, "float", 1, sinks=False)
CASE = Case(TURBO4, TURBO4, 128, 128, n_heads=32, n_kv_heads=8, queries=1, dtype=mx.float16)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(CASE, k=AFFINE8, v=AFFINE8), "do not read affine8 keys"),
        (replace(CASE, v=TURBO5), "do not read turbo5 values"),
        (replace(CASE, dim_v=112), "no variant for values of 112 values"),
        (replace(CASE, n_heads=136), "up to 16 query heads a KV head, not 136/8"),
        (replace(CASE, queries=9), "up to 8 query tokens, not 9"),
        (replace(CASE, dtype=mx.float64), "do not read"),
    ],
)
def test_what_no_kernel_does_is_refused_with_the_reason(case: Case, reason: str) -> None:
    assert reason in (plan.refusal(case) or "")


@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize("k", [FP16, INT8, TURBO5, TURBO4, TURBO2], ids=lambda codec: codec.name)
def test_the_rest_is_accepted(k: Codec, dim: int) -> None:
    assert plan.refusal(replace(CASE, k=k, dim_k=dim, queries=8, n_heads=128)) is None


@pytest.mark.parametrize("dim", order.TENSOR_CORE_DIMS)
@pytest.mark.parametrize("grouped", range(1, 9))
def test_every_fast_variant_fits_into_a_blocks_shared_memory(grouped: int, dim: int) -> None:
    for k_bits in (8, 5, 4, 3, 2):
        for v_bits in (8, 4, 3, 2):
            for rotary in (False, True):
                shape = plan.FastShape(dim, grouped, k_bits, v_bits, rotary)
                assert shape.shared_bytes <= MOST_SHARED


@pytest.mark.parametrize("dim_k", plan.DIMS)
@pytest.mark.parametrize("dim_v", plan.DIMS)
def test_every_general_variant_fits_too(dim_k: int, dim_v: int) -> None:
    assert plan.scan_shared_bytes(dim_k, dim_v, dim_k + 1) <= MOST_SHARED


def test_splits_are_at_most_a_block_a_multiprocessor_and_a_tile_a_warp() -> None:
    assert plan.fast_splits(8, [4096]) == 16
    assert plan.fast_splits(8, [256] * 8) == 2
    assert plan.fast_splits(8, [4096] * 64) == 1
    assert plan.fast_splits(8, [64]) == 8
    assert plan.fast_splits(8, [1]) == 1
    assert plan.fast_splits(8, [0, 0]) == 1


def test_a_row_longer_than_the_others_is_cut_into_more_parts() -> None:
    assert plan.fast_splits(8, [4096, *[64] * 7]) == 14
    assert plan.fast_splits(8, [4096, 2048]) == 11


def test_a_kernel_has_room_for_as_many_rows_or_some_more() -> None:
    assert [plan.room_for(rows) for rows in (1, 2, 8, 9, 33, 64, 65)] == [1, 8, 8, 32, 64, 64, None]


def test_every_head_of_every_row_has_a_counter_of_its_own() -> None:
    for heads in (1, 32, 1024, 1025, 64 * 64):
        assert heads <= plan.counters_for(heads)
    assert len({plan.counters_for(32 * rows) for rows in range(1, 65)}) == 2


@pytest.mark.parametrize(
    ("rope", "step", "gap"),
    [
        (nn.RoPE(128, base=500000.0), 1, 64),
        (nn.RoPE(128, traditional=True), 2, 1),
        (nn.RoPE(64, base=10000.0, scale=0.25), 1, 32),
    ],
)
def test_angles_are_those_of_the_rotary_embedding(rope: nn.RoPE, step: int, gap: int) -> None:
    found = angles.angles(Rotary(rope, 128), 128)
    assert found is not None
    assert (found.step, found.gap) == (step, gap)
    count = len(found.theta)
    inverse = rope.base ** (-np.arange(count) / count) * rope.scale
    assert np.allclose(found.theta, inverse, rtol=2e-6, atol=1e-10)
    assert np.allclose(found.factor, 1.0, atol=1e-6)


def test_an_embedding_that_does_not_turn_steadily_has_no_angles() -> None:
    rope = nn.RoPE(128)

    def switching(x: mx.array, offset: int) -> mx.array:
        return rope(x, offset=offset if offset < 5000 else offset + 777)

    assert angles.angles(Rotary(switching, 128), 128) is None


def test_the_constants_give_back_every_token_of_a_tile() -> None:
    """Take the table apart as the kernel's products do, and compare with cosines and sines."""
    theta = 500000.0 ** (-np.arange(64) / 64)
    words = angles.constants(theta)
    octets = words[:1024].view(np.uint8).reshape(8, 32, 4, 4).view(np.int8).astype(np.int64)

    def matrix(block: int) -> np.ndarray:
        out = np.zeros((16, 64), dtype=np.int64)
        for row in range(16):
            for pair in range(64):
                quad = pair // 4
                lane, component = row % 8 * 4 + quad // 4, quad % 2 * 2 + row // 8
                out[row, pair] = octets[block + quad % 4 // 2, lane, component, pair % 4]
        return out

    middle = np.arange(16)[:, None] + 0.5
    for part, wave in enumerate((np.cos(middle * theta), np.sin(middle * theta))):
        value = 256 * matrix(4 * part) + matrix(4 * part + 2)
        assert np.abs(value - 32512 * wave).max() <= 0.5
        corrections = words[1024 + 16 * part : 1040 + 16 * part].view(np.int32)
        assert np.array_equal(corrections, -128 * value.sum(axis=1))
    turns = words[1056:].view(np.uint64).astype(np.float64) / 2.0**64
    assert np.allclose(turns, theta / (4 * np.pi), rtol=1e-9)


def test_a_layers_constants_are_made_once_and_hold_its_keys_transform() -> None:
    layout = TileLayout(TURBO5, INT8, 64, 64, order.FRAGMENTS)
    scale = mx.array(np.linspace(0.5, 2.0, 128).reshape(2, 64).astype(np.float32))
    mean = mx.ones((2, 64))
    keys = KeyTransform(scale, mean, Rotary(nn.RoPE(64), 64))
    layer = layer_of(layout, 2, keys)
    assert layer is not None
    assert layer_of(layout, 2, keys) is layer
    numbers = np.array(layer.constants)
    assert np.allclose(np.abs(numbers[:128]), np.array(scale).ravel())
    assert np.allclose(numbers[192:320], 1.0)
    assert (layer.n_pairs, layer.step, layer.gap, layer.has_mean) == (32, 1, 32, True)
    assert len(numbers) == 320 + angles.WORDS


def test_spans_are_one_array_for_all_layers_of_a_step() -> None:
    spans = launch.spans_of(((100, 4, 64, 0), (70, 4, 32, 32)))
    assert launch.spans_of(((100, 4, 64, 0), (70, 4, 32, 32))) is spans
    assert spans.shape == (2, 16)
    assert spans[:, :4].tolist() == [[100, 4, 64, 0], [70, 4, 32, 32]]
    grown = launch.spans_of((Span(100, 4, 64, left=32), Span(70, 0, 0)), 5, fresh=True)
    assert grown[:, :7].tolist() == [[105, 4, 64, 0, 32, 1, 0], [75, 0, 0, 0, 0, 1, 0]]


def test_bodies_ask_for_rows_masks_and_sinks_only_where_there_are_any() -> None:
    assert "tiles1" not in FAST_TEXT[1]
    assert "tiles7_strides" in sources.fast_text({}, "float", 8, sinks=True)[1]
    assert "mask_shape" not in sources.scan_text(masked=False)[1]
    assert "logits, " in sources.merge_text(turned=True, sinks=True)[1]
    for text in (FAST_TEXT, sources.encode_text(), sources.fold_text({}, "float")):
        for line in text[0].splitlines():
            if line.startswith("#include"):
                assert (sources.FOLDER / line.split("/")[-1].rstrip('"')).is_file()
