from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from daemon.config.spec import ServerSpec
from daemon.supervisor import environment
from daemon.supervisor.environment import worker_command, worker_environment

SPEC = ServerSpec(model="m", port=1, env={"HF_HOME": "/data", "B": "mine"})


def test_a_worker_inherits_the_environment_less_what_is_the_daemons() -> None:
    environ = {"PATH": "/bin", "B": "theirs", "NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1"}
    env = worker_environment(SPEC, environ, preload=None)
    assert env == {
        "PATH": "/bin", "B": "mine", "HF_HOME": "/data", "PYTHONUNBUFFERED": "1", "MLX_ENABLE_TF32": "0",
    }  # fmt: skip


def test_float32_products_are_float32_unless_the_user_says_otherwise() -> None:
    assert worker_environment(SPEC, {}, preload=None)["MLX_ENABLE_TF32"] == "0"
    chosen = worker_environment(SPEC, {"MLX_ENABLE_TF32": "1"}, preload=None)
    assert chosen["MLX_ENABLE_TF32"] == "1"


def test_what_mlx_compiles_for_a_gpu_is_kept_in_the_users_own_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TQD_CACHE_DIR", str(tmp_path))
    assert "MLX_PTX_CACHE_DIR" not in worker_environment(SPEC, {}, preload=None)
    monkeypatch.setattr(environment, "backend", lambda: "cuda")
    kept = Path(worker_environment(SPEC, {}, preload=None)["MLX_PTX_CACHE_DIR"])
    assert kept.parent == tmp_path
    assert importlib.metadata.version("mlx") in kept.name
    chosen = worker_environment(SPEC, {"MLX_PTX_CACHE_DIR": "/mine"}, preload=None)
    assert chosen["MLX_PTX_CACHE_DIR"] == "/mine"


def test_openblas_joins_what_is_preloaded_already() -> None:
    blas = Path("/lib/libopenblas.so.0")
    assert worker_environment(SPEC, {}, preload=blas)["LD_PRELOAD"] == str(blas)
    env = worker_environment(SPEC, {"LD_PRELOAD": "/a.so"}, preload=blas)
    assert env["LD_PRELOAD"] == f"/a.so {blas}"


def test_the_servers_own_preload_wins() -> None:
    spec = SPEC.model_copy(update={"env": {"LD_PRELOAD": ""}})
    assert worker_environment(spec, {}, preload=Path("/b.so"))["LD_PRELOAD"] == ""


def test_a_worker_runs_our_python_or_the_one_it_asks_for() -> None:
    assert worker_command(SPEC, {}) == [sys.executable, "-P", "-m", "daemon.worker"]
    other = SPEC.model_copy(update={"python": "/venv/bin/python"})
    assert worker_command(other, {})[0] == "/venv/bin/python"
