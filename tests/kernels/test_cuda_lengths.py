"""Lengths are data to CUDA's kernels: nothing is compiled again because a sequence has grown. On cudashim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.kernels.cuda import launch, restoring
from daemon.policy.schemes import FP16, TURBO3_5
from tests.cudashim import shim
from tests.kernels.test_cuda_attention import Problem, build
from tests.metalshim.needed import needs_shim

pytestmark = needs_shim

SMALL = Problem(dim_k=64, dim_v=64, n_kv=1, grouped=2)
LENGTHS = [
    (0, 31, 2),
    (4, 32, 33),
    (4, 70, 1),
    (0, 640, 0),
    (40, 1100, 40),
]  # sinks, packed to, tail


@pytest.mark.parametrize(
    "problem",
    [
        replace(SMALL, mean="rotary", logits=True),
        replace(SMALL, k=FP16),
        replace(SMALL, v=TURBO3_5, queries=3, logits=True),
        replace(SMALL, mean="rotary", mask="additive", dim_k=96),
    ],
    ids=["tensor cores", "plain keys", "3.5 bits", "mask and mean"],
)
def test_lengths_are_data_and_compile_nothing(problem: Problem) -> None:
    compiled = []
    with shim.installed() as gpu:
        for sinks, packed_to, tail in LENGTHS:
            given = replace(problem, sinks=sinks, packed_to=packed_to, tail=tail)
            queries, stored, mask, logits = build(given)
            launch.attend(queries, stored, 0.1, mask, logits)
            restoring.restored(stored, "v", queries.dtype)
            compiled.append(len(gpu.sources))

    assert compiled[0] > 0
    assert set(compiled) == {compiled[0]}
