"""Find out what models compute on without loading MLX: ask a short-lived process, and remember the answer.

The answer is kept in the state folder together with what it depends on: another version of MLX, another
interpreter or another choice of devices, and it is asked again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from daemon.config.context import installed
from daemon.config.machine import DeviceFacts
from daemon.log import get_logger
from daemon.paths import StateDir
from daemon.supervisor import environment
from daemon.supervisor.files import read_json, write_private

_PACKAGES = ("mlx", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_TIMEOUT_S = 60.0  # the first use of a GPU after a boot takes its time
_facts: TypeAdapter[DeviceFacts] = TypeAdapter(DeviceFacts)


def facts(state: StateDir, environ: Mapping[str, str]) -> DeviceFacts | None:
    """Return what models compute on; None: the CPU, or nobody can tell, which is logged."""
    if environment.computes_on_cpu():
        return None
    depends_on = _depends_on(environ)
    known = read_json(state.device)
    if isinstance(known, dict) and known.get("depends_on") == depends_on:
        try:
            return _facts.validate_python(known.get("facts"))
        except ValidationError:
            pass  # written by another version: ask again
    found = _ask(environ)
    if found is not None:
        document = {"depends_on": depends_on, "facts": asdict(found)}
        try:
            write_private(state.device, json.dumps(document, indent=1).encode())
        except OSError as error:
            get_logger().error("state.not_written", path=str(state.device), error=error.strerror)
    return found


def parse(text: str) -> DeviceFacts:
    """Return the facts that `python -m daemon.worker.probe` printed.

    Raises:
        ValueError: *text* says no such thing.
    """
    document = json.loads(text.strip().splitlines()[-1])
    return _facts.validate_python(
        {name: document[name] for name in ("device", "name", "memory_bytes")}
    )


def _ask(environ: Mapping[str, str]) -> DeviceFacts | None:
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", "daemon.worker.probe"],
            env=environment.mlx_environment(environ, preload=None),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return parse(answer.stdout)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        reason = said[-1] if said else f"exit code {error.returncode}"
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        reason = str(error)
    get_logger().warning("device.unknown", reason=reason)
    return None


def _depends_on(environ: Mapping[str, str]) -> str:
    parts: dict[str, str | None] = {**installed(_PACKAGES)}
    parts |= {name: environ.get(name) for name in _VARIABLES}
    parts |= {"python": sys.executable, "system": platform.release()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
