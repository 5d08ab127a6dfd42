"""The blocked attention of prompts on CPUs against the reference, and what it holds in memory at once."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from daemon.cache.row import Row
from daemon.kernels import prompt, proof, reference
from daemon.kernels.case import Case
from daemon.policy.schemes import parse_scheme

HEADS, KV_HEADS, DIM = 6, 2, 64


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of eight queries and two tiles, so that short prompts have several."""
    monkeypatch.setattr(prompt, "BLOCK_QUERIES", 8)
    monkeypatch.setattr(prompt, "BLOCK_SCORES", HEADS * 8 * 64)


def case(scheme: str, **extras: object) -> Case:
    kinds = parse_scheme(scheme)
    plain = Case(
        kinds.k, kinds.v, dim_k=DIM, dim_v=DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, queries=21, dtype=mx.float32
    )  # fmt: skip
    return replace(plain, **extras)


CASES = [
    case("int8", queries=37),  # the whole tail
    case("turbo8v4", queries=1),
    case("turbo4v4", scaled_keys=True, key_mean="rotary", dtype=mx.bfloat16),
    case("turbo3.5v3", scaled_keys=True, key_mean="rotary", learned_sinks=True),
    case("turbo5v2", scaled_keys=True, key_mean="constant", mask="boolean"),
    case("turbo3tv3t", scaled_keys=True, key_mean="rotary"),
    case("turbo2v0", mask="additive", learned_sinks=True),
    case("turbo0v4", mask="boolean", dtype=mx.float16),
    case("affine4", mask="additive"),
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("asked", CASES, ids=str)
def test_agrees_with_the_reference(asked: Case) -> None:
    assert proof.problem(prompt, asked) is None


@pytest.mark.parametrize("asked", CASES, ids=str)
def test_the_reference_gives_the_same_in_any_number_of_blocks(
    asked: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = proof.sample(asked)
    whole = given.run(reference)

    monkeypatch.setattr(reference, "_BLOCK_VALUES", 2 * 32 * DIM * KV_HEADS)

    assert proof.difference(given.run(reference), whole, asked) is None


def filled(scheme: str, length: int, *, tail: int = 32) -> Row:
    row = Row(parse_scheme(scheme), sink_tokens=4, tail_tokens=tail)
    row.append(*mx.random.normal((2, KV_HEADS, length, DIM), key=mx.random.key(length)))
    return row


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scheme", ["fp16", "int8", "turbo0v4", "turbo4v0"])
@pytest.mark.parametrize("packed", [False, True])
def test_any_length_before_and_after_packing(scheme: str, *, packed: bool) -> None:
    for length in (1, 3, 4, 5, 32, 33, 70, 130):
        row = filled(scheme, length)
        if packed:
            row.pack()
        queries = mx.random.normal((HEADS, min(length, 20), DIM), key=mx.random.key(1))

        got = prompt.attend(queries, row.stored(), 0.2, None, None)

        expected = reference.attend(queries, row.stored(), 0.2, None, None)
        assert mx.allclose(got, expected, atol=1e-5).item(), length


@pytest.mark.usefixtures("small_blocks")
def test_a_query_may_see_nothing_of_the_first_blocks() -> None:
    row = filled("turbo4v4", 300)
    row.pack()
    queries = mx.random.normal((HEADS, 20, DIM), key=mx.random.key(1))
    window = mx.arange(300)[None] > mx.arange(280, 300)[:, None] - 50
    mask = window & (mx.arange(300)[None] <= mx.arange(280, 300)[:, None])

    got = prompt.attend(queries, row.stored(), 0.2, mask, None)

    expected = reference.attend(queries, row.stored(), 0.2, mask, None)
    assert mx.allclose(got, expected, atol=1e-5).item()


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="measures a CPU's memory")
def test_neither_scores_nor_a_dequantized_history_are_held_whole() -> None:
    """512 queries on 8,192 tokens: their scores take 107 MB, which is what MLX's own attention holds here."""
    length, new = 8192, 512
    row = filled("turbo4v4", length)
    row.pack()
    row.append(*mx.random.normal((2, KV_HEADS, new, DIM)))
    queries = mx.random.normal((HEADS, new, DIM))
    mx.eval(row.arrays, queries)
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()

    mx.eval(prompt.attend(queries, row.stored(), 0.2, None, None))

    scores = HEADS * new * (length + new) * 4
    assert mx.get_peak_memory() - held < scores / 3
