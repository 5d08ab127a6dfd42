"""Architectures for tests: of real configurations, and made of nothing but layer kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon.policy.architecture import Architecture, Layer, LayerKind, read_architecture
from daemon.policy.request import request
from daemon.policy.resolve import resolve
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.spec import KvSpec, NamedPolicy
from daemon.policy.store import load_policies

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


@pytest.fixture
def config() -> Callable[[str], dict[str, Any]]:
    """Return the content of tests/data/configs/<name>.json."""

    def read(name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
        return content

    return read


@pytest.fixture
def arch(config: Callable[[str], dict[str, Any]]) -> Callable[[str], Architecture]:
    """Return the architecture of tests/data/configs/<name>.json."""
    return lambda name: read_architecture(config(name))


@pytest.fixture
def plain() -> Callable[..., Architecture]:
    """Return an architecture with one letter a layer: f(ull) s(liding) c(hunked) r(ecurrent) l(atent)."""
    kinds = {kind.value[0]: kind for kind in LayerKind if kind is not LayerKind.SHARED}

    def make(letters: str, **changes: Any) -> Architecture:
        layers = tuple(
            Layer(i, kind)
            if kind is LayerKind.RECURRENT
            else Layer(i, kind, 2, 64, 64, window=128 if kind in ("sliding", "chunked") else None)
            for i, kind in enumerate(kinds[letter] for letter in letters)
        )
        facts: dict[str, Any] = {
            "model_type": "llama", "family": "llama", "n_heads": 4, "max_context": 8192, "vocab_size": 100,
        }  # fmt: skip
        return Architecture(layers=layers, **(facts | changes))

    return make


@pytest.fixture(scope="session")
def policies() -> dict[str, NamedPolicy]:
    """Return the shipped policies."""
    return load_policies().policies


@pytest.fixture
def resolved(policies: dict[str, NamedPolicy]) -> Callable[..., ResolvedPolicy]:
    """Return the resolution of a `kv` block for an architecture."""

    def run(
        arch: Architecture, allowed: str | None = None, key_means: bool = True, **keys: Any
    ) -> ResolvedPolicy:
        asked = request(KvSpec(**keys), policies)
        return resolve(asked, arch, allowed=allowed, key_means=key_means)

    return run
