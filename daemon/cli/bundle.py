"""The archive of `tqd doctor --bundle`: what somebody needs who is to help, and no secret."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil

from daemon.cli.findings import Finding, Scene
from daemon.cli.following import Log
from daemon.cli.machine_findings import versions
from daemon.config.effects import leaves
from daemon.config.load import Loaded
from daemon.errors import TqdError
from daemon.ops.applied import HIDDEN, applied
from daemon.ops.redaction import Redaction, is_secret_name
from daemon.paths import StateDir
from daemon.supervisor.environment import inherited
from daemon.supervisor.files import read_json
from daemon.supervisor.last_good import LastGood

LOG_LINES = 400
FOLDER = "tqd-doctor"

_LAUNCH = re.compile(rb"^--- launch \d+ pid \d+ spec ")
# `api_key: …` and `SOME_VARIABLE: …` in a file that may not be YAML at all
_WRITTEN_SECRET = re.compile(
    r"""\b(?:api_key|[A-Z][A-Z0-9_]+)["']?\s*:\s*("[^"\n]*"|'[^'\n]*'|[^\s,{}#]+)"""
)


def write(path: Path, scene: Scene, findings: Iterable[Finding]) -> None:
    """Write the archive *path*, for this user alone.

    Raises:
        TqdError: there is such a file, or it cannot be written.
    """
    redaction = Redaction(_secrets(scene))
    documents = {
        "findings.json": [asdict(it) for it in findings],
        "versions.json": versions(),
        "environment.json": sorted(inherited()),
        "config.json": _configuration(scene),
        "status.json": scene.daemon,
        "memory.json": _memory(scene),
        "state.json": _state(scene.state),
    }
    texts = {
        name: json.dumps(redaction.document(it), indent=1, ensure_ascii=False)
        for name, it in documents.items()
    }
    texts |= {f"logs/{name}": redaction.text(text) for name, text in _logs(scene)}
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in texts.items():
                _add(archive, name, text)
    except FileExistsError:
        raise TqdError(f"{path} exists", hint="name another file") from None
    except OSError as error:
        raise TqdError(f"{path} cannot be written: {error.strerror}") from error


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    member = tarfile.TarInfo(f"{FOLDER}/{name}")
    member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(data))


def _secrets(scene: Scene) -> Iterator[str]:
    """Yield every secret that is known here, now or in the last good configuration."""
    environ = inherited()
    yield from (value for name, value in environ.items() if is_secret_name(name))
    earlier = LastGood(scene.state.last_good, environ).load(scene.config)
    for loaded in (scene.loaded, earlier):
        if loaded is not None:
            yield from _configured_secrets(loaded)
    for place in {scene.config, *(scene.loaded.files if scene.loaded else ())}:
        # a file that cannot be understood holds keys and variables all the same
        yield from (it.strip("\"'") for it in _WRITTEN_SECRET.findall(_text(place)))


def _configured_secrets(loaded: Loaded) -> Iterator[str]:
    yield from loaded.api_keys.values()
    for name, spec in loaded.servers.servers.items():
        yield from spec.env.values()
        hidden = loaded.sources[name].hidden
        yield from (str(it) for path, it in leaves(spec).items() if path in hidden)
        if spec.api_key is not None and not isinstance(spec.api_key, str):
            yield from _text(Path(spec.api_key.file)).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _configuration(scene: Scene) -> object:
    loaded = scene.loaded
    if loaded is None:
        problems = scene.refused.problems if scene.refused else ()
        return {"path": str(scene.config), "refused": [asdict(it) for it in problems]}
    return applied(loaded, 0)


def _memory(scene: Scene) -> object:
    """Return where the memory of this machine is: in total, and in our processes."""
    pids = {}
    if scene.daemon is not None:
        pids = {it["name"]: it["pid"] for it in scene.daemon["servers"] if it["pid"]}
        pids["(daemon)"] = scene.daemon["daemon"]["pid"]
    return {
        "machine": psutil.virtual_memory()._asdict(),
        "swap": psutil.swap_memory()._asdict(),
        "processes": {name: _process(pid) for name, pid in pids.items()},
    }


def _process(pid: int) -> object:
    try:
        return psutil.Process(pid).memory_info()._asdict()
    except psutil.Error as error:
        return str(error)


def _state(state: StateDir) -> object:
    """Return what the state folder holds: the small files, and of the others name, size and mode."""
    files = [path for path in sorted(state.root.rglob("*")) if not path.is_dir()]
    return {
        "folder": str(state.root),
        "files": {str(path.relative_to(state.root)): _listed(path) for path in files},
        "lock": read_json(state.lock),
        "desired": read_json(state.desired),
        "workers": _without_nonces(read_json(state.workers)),
        "refused": read_json(state.refused),
    }


def _listed(path: Path) -> object:
    try:
        found = path.lstat()
    except OSError as error:
        return error.strerror
    return {"bytes": found.st_size, "mode": f"{found.st_mode:o}", "modified": found.st_mtime}


def _without_nonces(value: object) -> object:
    """Return *value* without the words by which a worker proves whose it is."""
    if isinstance(value, dict):
        return {
            name: HIDDEN if name == "nonce" else _without_nonces(it) for name, it in value.items()
        }
    return [_without_nonces(it) for it in value] if isinstance(value, list) else value


def _logs(scene: Scene) -> Iterator[tuple[str, str]]:
    """Yield the daemon's logs and those of the servers, from the start of their last launch."""
    own = scene.state.daemon_log
    paths = {path.name: path for path in (own, own.with_name("startup.log"))}
    if scene.daemon is not None:
        paths |= {f"{it['name']}.log": Path(it["log_path"]) for it in scene.daemon["servers"]}
    else:
        folder = scene.state.server_log("x").parent
        paths |= {path.name: path for path in sorted(folder.glob("*.log"))}
    for name, path in paths.items():
        try:
            with Log(path) as log:
                lines = log.last(LOG_LINES)
        except OSError:
            continue
        starts = [at for at, line in enumerate(lines) if _LAUNCH.match(line)]
        last_launch = lines[starts[-1] :] if starts else lines
        yield name, b"".join(last_launch).decode(errors="replace")
