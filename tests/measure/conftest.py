"""A small model with every kind of cache that a policy does not pack, and one with nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny_llama import tiny_llama

TOKENS = [(i * 131 + 7) % 499 for i in range(400)]


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a llama of two layers with random weights."""
    from daemon.cache import seam

    seam.install()
    return tiny_llama(5, hidden_size=64, num_hidden_layers=2, intermediate_size=128, vocab_size=499)
