from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from daemon import paths


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine has no device for, with the reason."""
    for item in items:
        if "metal" in item.keywords and not mx.metal.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an Apple GPU"))
        if "cuda" in item.keywords and not mx.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The folder of the demo model, made on first use and kept in the cache folder."""
    from daemon.measure import demo_model

    return demo_model.make(paths.cache_dir())


@pytest.fixture(autouse=True)
def _no_settings_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must not see the servers.yaml or the state folder of whoever runs them."""
    for name in ("TQD_CONFIG", "TQD_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
