from __future__ import annotations

from daemon.measure.context import examine


def test_mlx_multiplies_here_and_says_where() -> None:
    found = examine()
    assert found.correct
    assert found.device in ("cpu", "metal", "cuda")
    assert {"tqd", "mlx", "mlx-lm"} <= found.versions.keys()
