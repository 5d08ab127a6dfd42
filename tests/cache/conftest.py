from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from daemon.cache import seam
from daemon.cache.row import Row
from daemon.cache.sequence import SequenceCache
from daemon.policy.schemes import parse_scheme
from tests.tiny_llama import tiny_llama

MakeCaches = Callable[..., list[SequenceCache]]


@pytest.fixture(scope="session", autouse=True)
def _seam() -> None:
    seam.install()


@pytest.fixture(scope="session", name="tiny_llama")
def _tiny_llama() -> Any:
    """A llama of four layers with GQA and random weights: 2 KV heads of 32 values."""
    return tiny_llama(7)


@pytest.fixture
def make_caches(tiny_llama: Any) -> MakeCaches:
    def make(scheme: str, **options: Any) -> list[SequenceCache]:
        settings = {"sink_tokens": 4, "tail_tokens": 32, **options}
        return [SequenceCache(Row(parse_scheme(scheme), **settings)) for _ in tiny_llama.layers]

    return make
