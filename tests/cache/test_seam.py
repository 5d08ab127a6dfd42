from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama

from daemon.cache import seam


def test_ordinary_arrays_go_to_mlx_lm_unchanged() -> None:
    q, k, v = (mx.random.normal((1, 2, 5, 32), key=mx.random.key(i)) for i in range(3))

    got = base.scaled_dot_product_attention(q, k, v, cache=None, scale=0.1, mask="causal")

    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask="causal")
    assert mx.array_equal(got, expected)


def test_modules_loaded_before_and_after_use_the_seam() -> None:
    """In a fresh process: llama is imported first, the seam is installed, qwen3 is imported later."""
    code = (
        "from mlx_lm.models import llama\n"
        "from daemon.cache import seam\n"
        "seam.install(); seam.install()\n"
        "from mlx_lm.models import qwen3\n"
        "assert llama.scaled_dot_product_attention is seam.scaled_dot_product_attention\n"
        "assert qwen3.scaled_dot_product_attention is seam.scaled_dot_product_attention\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_mlx_lm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam.mlx_lm, "__version__", "9.9.9")

    with pytest.raises(RuntimeError, match="knows mlx-lm"):
        seam.install()

    assert llama.scaled_dot_product_attention is seam.scaled_dot_product_attention
