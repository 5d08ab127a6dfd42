"""Where tqd keeps its state, logs and caches on this platform."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import platformdirs

SOCKET_PATH_LIMIT = 100  # bytes; sun_path holds 104 on macOS and 108 on Linux, NUL included


@dataclass(frozen=True, slots=True)
class StateDir:
    """The layout of a state folder; two state folders are two independent daemons."""

    root: Path

    @property
    def lock(self) -> Path:
        """Held with flock for the life of a daemon."""
        return self.root / "lock"

    @property
    def desired(self) -> Path:
        """What the user wants of each server: running or stopped."""
        return self.root / "desired.json"

    @property
    def workers(self) -> Path:
        """The workers of this daemon by pid, start time and nonce."""
        return self.root / "workers.json"

    @property
    def refused(self) -> Path:
        """Why a daemon of a service ended where starting it again cannot help."""
        return self.root / "refused.json"

    @property
    def daemon_log(self) -> Path:
        """The log of a daemon that runs detached."""
        return self.root / "logs" / "daemon.log"

    @property
    def allowlist(self) -> Path:
        """Local allowlist entries."""
        return self.root / "allowlist.yaml"

    @property
    def profiles(self) -> Path:
        """Calibration profiles, one file per model and text."""
        return self.root / "profiles"

    @property
    def device(self) -> Path:
        """What models compute on, as it was found out last."""
        return self.root / "device.json"

    @property
    def last_good(self) -> Path:
        """The last configuration that was accepted."""
        return self.root / "last-good"

    @property
    def reloads(self) -> Path:
        """What became of the last readings of servers.yaml."""
        return self.root / "reloads.json"

    def server_log(self, name: str, log_dir: Path | None = None) -> Path:
        """The log file of one server."""
        return _log(self.root, log_dir, name)

    @property
    def socket(self) -> Path:
        """The control socket; moved to a private folder when the path would not fit in sun_path."""
        path = self.root / "tqd.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT:
            return path
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()  # noqa: TID251 - paths
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        return Path(base) / f"tqd-{os.getuid()}-{digest}" / "tqd.sock"


@lru_cache(maxsize=1024)  # every status asks for that of every server
def _log(root: Path, log_dir: Path | None, name: str) -> Path:
    return (log_dir or root / "logs" / "servers") / f"{name}.log"


def state_dir(override: str | os.PathLike[str] | None = None) -> StateDir:
    """Return the state folder: *override*, else $TQD_STATE_DIR, else the platform's own."""
    chosen = override or os.environ.get("TQD_STATE_DIR")  # noqa: TID251 - documented override
    root = Path(chosen) if chosen else platformdirs.user_state_path("tqd")
    return StateDir(root.expanduser().absolute())


def cache_dir() -> Path:
    """Return the folder for what can be made again: the converted demo model."""
    override = os.environ.get("TQD_CACHE_DIR")  # noqa: TID251 - documented override
    return (
        Path(override).expanduser().absolute() if override else platformdirs.user_cache_path("tqd")
    )


def config_file(override: str | os.PathLike[str] | None = None) -> Path:
    """Return the servers.yaml to use: *override*, else $TQD_CONFIG, ./servers.yaml, the user's config folder."""
    chosen = override or os.environ.get("TQD_CONFIG")  # noqa: TID251 - documented override
    if chosen:
        return Path(chosen).expanduser().absolute()
    local = Path("servers.yaml").absolute()
    return local if local.exists() else default_config_file()


def default_config_file() -> Path:
    """Return the servers.yaml of the user's configuration folder, used where nothing names another."""
    return platformdirs.user_config_path("tqd") / "servers.yaml"


def hf_hub_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return the local Hugging Face cache, found as huggingface_hub finds it.

    *env* is what a worker's environment has on top of this process's own.
    """
    env = {**os.environ, **(env or {})}  # noqa: TID251 - the variables belong to huggingface_hub
    if "HF_HUB_CACHE" in env:
        return Path(env["HF_HUB_CACHE"]).expanduser()
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(home).expanduser() / "hub"
