"""What reading a long prompt holds in memory at once, with packed caches and with mlx-lm's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.kernels import prompt
from daemon.kernels.attention import on_this_device
from daemon.policy.schemes import parse_scheme

TOKENS, CHUNK = 1024, 256


def peak(model: Any, caches: list[Any]) -> int:
    """Return the bytes that reading a prompt of TOKENS into *caches* needs at most, weights not counted."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for at in range(0, TOKENS, CHUNK):
        model((mx.arange(at, at + CHUNK) % 997)[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    return mx.get_peak_memory() - before


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="measures a CPU's memory")
@pytest.mark.parametrize("scheme", ["int8", "turbo4v4"])
def test_a_packed_prefill_peaks_below_one_in_full_precision(
    scheme: str, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are as much smaller than usual as the model is."""
    monkeypatch.setattr(prompt, "BLOCK_SCORES", 2**15)
    kinds, attention = parse_scheme(scheme), on_this_device()
    packed = [
        SequenceCache(Row(kinds, sink_tokens=4, tail_tokens=32, attention=attention))
        for _ in tiny_llama.layers
    ]

    ours, stock = peak(tiny_llama, packed), peak(tiny_llama, make_prompt_cache(tiny_llama))

    assert ours < 0.7 * stock
