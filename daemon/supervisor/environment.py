"""Decide what a worker is started with: its command line and its environment."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from daemon import paths
from daemon.config.spec import ServerSpec

# The daemon's own conversation with systemd is none of a worker's business.
_DAEMON_ONLY = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)

# Where Debian and its derivatives put OpenBLAS. The CPU wheel of mlx links the reference BLAS, which
# is about twenty times slower at prefill; preloading OpenBLAS replaces it.
_OPENBLAS = tuple(
    Path(f"/usr/lib/{machine}-linux-gnu/libopenblas.so.0") for machine in ("x86_64", "aarch64")
)

OPENBLAS_HINT = "models run on the CPU; with OpenBLAS prompts are read about 20 times faster: apt install libopenblas0-pthread"

# Test hook, not a setting: another program in the place of `python -m daemon.worker`.
_WORKER_COMMAND = "TQD_WORKER_COMMAND"


def inherited() -> dict[str, str]:
    """Return the daemon's own environment, as servers.yaml may refer to it."""
    return dict(os.environ)  # noqa: TID251 - the one place where a child's environment begins


def worker_command(spec: ServerSpec, environ: Mapping[str, str]) -> list[str]:
    """Return the command line of a worker, without the numbers of its file descriptors.

    ``-P`` keeps the working directory out of the worker's import path.
    """
    if replacement := environ.get(_WORKER_COMMAND):
        return shlex.split(replacement)
    return [spec.python or sys.executable, "-P", "-m", "daemon.worker"]


def worker_environment(
    spec: ServerSpec, environ: Mapping[str, str], *, preload: Path | None
) -> dict[str, str]:
    """Return the environment of a worker: that of any process that runs MLX, plus `env:`, which wins."""
    return mlx_environment(environ, preload=preload) | spec.env


def mlx_environment(environ: Mapping[str, str], *, preload: Path | None) -> dict[str, str]:
    """Return *environ* for a child that runs MLX, less what is the daemon's alone.

    *preload* goes into LD_PRELOAD, after what is there already.
    """
    env = {name: value for name, value in environ.items() if name not in _DAEMON_ONLY}
    if preload is not None:
        env["LD_PRELOAD"] = " ".join(filter(None, (env.get("LD_PRELOAD"), str(preload))))
    env["PYTHONUNBUFFERED"] = "1"  # a crash must not swallow the lines that explain it
    # on CUDA, MLX rounds the factors of float32 products to 10 bits unless told otherwise; rotations and
    # scores of packed keys are float32 because they need more (the kernels' tests fail with it on an H200)
    env.setdefault("MLX_ENABLE_TF32", "0")
    if backend() == "cuda":
        # by default in a folder of /tmp that anybody may have made, and that a service loses when it restarts
        compiled = paths.cache_dir() / f"mlx-{importlib.metadata.version('mlx')}"
        env.setdefault("MLX_PTX_CACHE_DIR", str(compiled))
    return env


def openblas() -> Path | None:
    """Return the OpenBLAS to preload into workers that compute on the CPU, if there is one."""
    if not computes_on_cpu():
        return None
    return next((path for path in _OPENBLAS if path.exists()), None)


def backend() -> Literal["metal", "cuda", "cpu"]:
    """Return what workers of this machine compute on."""
    if sys.platform == "darwin":
        return "metal"
    return "cpu" if computes_on_cpu() else "cuda"


def computes_on_cpu() -> bool:
    """Whether workers of this machine run MLX on the CPU: Linux without MLX's CUDA package or a GPU."""
    if sys.platform != "linux":
        return False
    has_gpu = Path("/dev/nvidiactl").exists()
    return not (has_gpu and any(map(_installed, ("mlx-cuda-12", "mlx-cuda-13"))))


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
