"""What `tqd doctor` finds about this machine: versions, MLX, memory, BLAS, disks, limits."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from pydantic import ValidationError

from daemon.cli.findings import Finding, Scene
from daemon.config.context import MlxContext, installed
from daemon.config.machine import host_memory
from daemon.paths import hf_hub_dir
from daemon.supervisor.environment import (
    OPENBLAS_HINT,
    computes_on_cpu,
    inherited,
    mlx_environment,
    openblas,
)
from daemon.units import format_size

MLX_TIMEOUT_S = 120.0  # the first use of a GPU after a boot takes its time
LITTLE_SPACE = 5 * 2**30  # bytes; a model would not fit
NO_SPACE = 200 * 2**20  # bytes; logs and state files may not
FEW_FILES = 1024  # open files; each request takes one, each server a few


def machine(scene: Scene) -> Iterator[Finding]:
    """Yield what there is to say about the machine, before anything is served on it."""
    yield from _versions(scene)
    yield from _mlx(scene)
    yield _memory()
    yield from _blas()
    yield from _space(scene)
    yield _open_files()


def versions() -> dict[str, str]:
    """Return the versions of what matters here, those that are installed."""
    return {"python": platform.python_version(), **installed()}


def misfits(installed: Mapping[str, str], requirements: list[str]) -> list[str]:
    """Return which packages are not of the one version that *requirements* name."""
    pins = [
        re.fullmatch(r"([\w-]+)==([\w.]+)", it.partition(";")[0].strip()) for it in requirements
    ]
    return [
        f"{pin[1]} {installed[pin[1]]}, where tqd was made for {pin[2]}"
        for pin in pins
        if pin and installed.get(pin[1], pin[2]) != pin[2]
    ]


def _versions(scene: Scene) -> Iterator[Finding]:
    found = versions()
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    wrong = misfits(found, importlib.metadata.requires("tqd") or [])
    where = f"{text} ({platform.system()} {platform.machine()}, {sys.executable})"
    if wrong:
        hint = f"{'; '.join(wrong)}: install tqd's own versions again"
        yield Finding("versions", "warn", where, hint)
    else:
        yield Finding("versions", "ok", where)
    if scene.daemon is not None and scene.daemon["daemon"]["version"] != found["tqd"]:
        yield Finding(
            "versions",
            "warn",
            f"the running daemon is {scene.daemon['daemon']['version']}",
            "`tqd shutdown`, then `tqd start`, and it is this one",
        )


def _mlx(scene: Scene) -> Iterator[Finding]:
    """Try MLX out with every interpreter that a worker would have."""
    specs = scene.loaded.servers.servers.values() if scene.loaded else ()
    for python in dict.fromkeys([sys.executable, *(it.python for it in specs if it.python)]):
        yield _try_mlx(python)


def _try_mlx(python: str) -> Finding:
    environment = mlx_environment(inherited(), preload=openblas())
    try:
        done = subprocess.run(
            [python, "-P", "-m", "daemon.measure", "context"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MLX_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("mlx", "problem", f"{python}: {error}", "a worker would hang or fail alike")
    try:
        context = MlxContext.model_validate(json.loads(done.stdout)["result"])
    except (ValueError, LookupError, TypeError, ValidationError):
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        return Finding(
            "mlx",
            "problem",
            f"one operation of MLX ended with {how}: {said}",
            f"`{python} -m daemon.measure context` repeats it; no worker can run like this",
        )
    return judge_mlx(context, has_gpu=Path("/dev/nvidiactl").exists())


def judge_mlx(context: MlxContext, *, has_gpu: bool) -> Finding:
    """Return what *context* means on a machine that has an NVIDIA GPU, or not."""
    size = f", {format_size(context.memory_bytes)}" if context.memory_bytes else ""
    text = (
        f"computes on {context.device} ({context.device_name}{size}), mlx {context.versions['mlx']}"
    )
    if not context.correct:
        hint = (
            "a product of two small matrices came out wrong: look at the driver and at `versions`"
        )
        return Finding("mlx", "problem", text, hint)
    if context.device == "cpu" and has_gpu:
        hint = "there is an NVIDIA GPU: pip install 'tqd[cuda13]', or cuda12 for older drivers"
        return Finding("mlx", "warn", text, hint)
    return Finding("mlx", "ok", text)


def _memory() -> Finding:
    total, swap, now = psutil.virtual_memory().total, psutil.swap_memory().total, host_memory()
    limit = now.total_bytes
    container = f", of which this container may use {format_size(limit)}" if limit < total else ""
    wired = "" if now.wired_bytes is None else f", {format_size(now.wired_bytes)} wired"
    text = (
        f"{format_size(total)}{container}, {format_size(now.available_bytes)} free{wired},"
        f" swap {format_size(now.swap_used_bytes)} of {format_size(swap)} used, pressure {now.pressure or 'unknown'}"
    )
    if now.pressure in ("warn", "critical"):
        return Finding(
            "memory", "warn", text, "close other programs: models may not load, or be slow"
        )
    return Finding("memory", "ok", text)


def _blas() -> Iterator[Finding]:
    if not computes_on_cpu():
        return
    library = openblas()
    if library is None:
        yield Finding("blas", "warn", "MLX's own", OPENBLAS_HINT)
    else:
        yield Finding("blas", "ok", str(library))


def _space(scene: Scene) -> Iterator[Finding]:
    log_dir = scene.loaded.servers.daemon.log.dir if scene.loaded else None
    folders = {
        "state": scene.state.root,
        "logs": Path(log_dir) if log_dir else scene.state.server_log("x").parent,
        "models": hf_hub_dir(),
    }
    seen = set()
    for name, folder in folders.items():
        existing = next(it for it in (folder, *folder.parents) if it.exists())
        device = existing.stat().st_dev
        if device not in seen:
            seen.add(device)
            yield judge_space(name, folder, shutil.disk_usage(existing).free)


def judge_space(name: str, folder: Path, free: int) -> Finding:
    """Return what *free* bytes for *name*, in *folder*, mean."""
    text = f"{format_size(free)} free for {name} ({folder})"
    if free < NO_SPACE:
        hint = "logs will be lost, and state will not be saved; make room"
        return Finding("disk", "problem", text, hint)
    if free < LITTLE_SPACE:
        return Finding("disk", "warn", text, "a model to fetch would not fit")
    return Finding("disk", "ok", text)


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        hint = "`ulimit -n 4096` before `tqd start`; an installed service has more"
        return Finding("files", "warn", f"at most {soft} open files", hint)
    return Finding("files", "ok", f"at most {soft:,} open files")
