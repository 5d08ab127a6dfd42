"""What a service that is installed from this shell runs: which interpreter, files, account and environment."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from daemon.config.load import load
from daemon.errors import ConfigError, TqdError
from daemon.service.unit import Paths, Scope, stop_s
from daemon.supervisor.environment import inherited

_TRIAL_TIMEOUT_S = 60.0


def paths_for(
    scope: Scope, run_as: str | None, *, config: Path, state: Path
) -> tuple[Paths, str | None]:
    """Return what the service's file is filled in with, and a warning, if there is one.

    Raises:
        ConfigError: *config* is broken.
        TqdError: there is nobody to run the service as.
    """
    account = _account(scope, run_as)
    given = inherited()
    home = Path(account.pw_dir)
    is_ours = account.pw_uid == os.getuid()
    environment = {
        "PATH": _search_path(given.get("PATH", os.defpath)),
        "HF_HOME": str(home / ".cache" / "huggingface"),
    }
    if is_ours:
        kept = ("HF_HOME", "HF_HUB_CACHE")
        environment |= {name: given[name] for name in kept if given.get(name)}
    else:
        config, state = _moved(config, home), _moved(state, home)
    paths = Paths(
        python=os.path.abspath(sys.executable),  # noqa: PTH100 - a link here is a virtual environment
        config=config,
        state=state,
        home=home,
        environment=environment,
        stop_s=0,
        user=account.pw_name,
    )
    limit_s, warning = _read(paths, given)
    return replace(paths, stop_s=limit_s), warning


def try_out(paths: Paths) -> None:
    """Run tqd once as the service will.

    Raises:
        TqdError: that does not work, such as when this shell's PYTHONPATH is what makes it work here.
    """
    command = [paths.python, "-P", "-m", "daemon", "--version"]
    try:
        done = subprocess.run(
            command,
            env=_environment(paths),
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TqdError(f"`{' '.join(command)}` does not run: {error}") from error
    if done.returncode != 0:
        *_, last = done.stderr.splitlines() or ["no word"]
        raise TqdError(
            f"`{' '.join(command)}` does not run without this shell's environment: {last}",
            hint="install tqd into the environment of this interpreter; a service sees no PYTHONPATH",
        )


def _account(scope: Scope, run_as: str | None) -> pwd.struct_passwd:
    if scope is Scope.USER:
        if run_as is not None:
            raise TqdError(
                "your own services run as you", hint="--run-as goes with --system, or leave it out"
            )
        return pwd.getpwuid(os.getuid())
    name = run_as or inherited().get("SUDO_USER")
    if name is None:
        raise TqdError(
            "a service of the machine needs an account to run as", hint="--run-as USER names one"
        )
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise TqdError(f'there is no account "{name}" on this machine') from None


def _moved(path: Path, home: Path) -> Path:
    """Return *path*, of the account that asks, as the account with *home* has it."""
    own = Path.home()
    return home / path.relative_to(own) if path.is_relative_to(own) else path


def _search_path(text: str) -> str:
    """Return *text* as a PATH without what depends on where a program is started, and without doubles."""
    return os.pathsep.join(
        dict.fromkeys(it for it in text.split(os.pathsep) if Path(it).is_absolute())
    )


def _environment(paths: Paths) -> dict[str, str]:
    """Return the environment that the service will have."""
    who = {"HOME": str(paths.home), "USER": paths.user, "LOGNAME": paths.user}
    return who | dict(paths.environment)


def _read(paths: Paths, given: Mapping[str, str]) -> tuple[int, str | None]:
    """Return how long a stop may take, and what the service will miss that this shell has."""
    try:
        return stop_s(load(paths.config, environ=_environment(paths)).servers.servers), None
    except ConfigError as error:
        problems = error.problems
    servers = load(paths.config, environ=given).servers.servers  # broken here too: that is said
    missing = "; ".join(f"{it.path}: {it.message}" for it in problems)
    return stop_s(servers), (
        f"the service will not have this shell's environment, and refuse {paths.config}: {missing}\n"
        "  hint: keep a key in a file of its own, `api_key: {file: path}`, or give the service its variables"
        " (systemd: `systemctl --user edit tqd`)"
    )
