"""What `tqd doctor` finds about this tqd: configuration, ports, state folder, daemon, services."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from daemon.cli import hosts
from daemon.cli.findings import Finding, Scene
from daemon.cli.ports import look_at_ports
from daemon.cli.service import describe
from daemon.config.load import Loaded
from daemon.config.prepare import prepare
from daemon.errors import ConfigError, Problem, TqdError
from daemon.paths import StateDir
from daemon.service.unit import Scope
from daemon.supervisor.instance import holder


def site(scene: Scene) -> Iterator[Finding]:
    """Yield what there is to say about the configuration and what runs of it."""
    yield from _configuration(scene)
    yield from _ports(scene)
    yield from _state_folder(scene.state)
    yield _daemon(scene)
    yield from _services()


def _configuration(scene: Scene) -> Iterator[Finding]:
    if scene.loaded is None:
        yield from map(_problem, scene.refused.problems if scene.refused else ())
        return
    try:
        prepared = prepare(scene.loaded, state=scene.state)
    except ConfigError as error:
        yield from map(_problem, error.problems)
        return
    yield Finding("config", "ok", f"{scene.config}: {', '.join(prepared.servers) or 'no servers'}")
    for server in prepared.servers.values():
        if server.blocked is not None and server.spec.enabled:
            message, hint = server.blocked.message, server.blocked.hint
            yield Finding("config", "warn", f"{server.name} ({server.model}): {message}", hint)
    for path in _readable_secrets(scene.loaded):
        yield Finding(
            "config",
            "warn",
            f"others on this machine can read {path}, and it holds an API key",
            f"chmod go-rwx {path}",
        )


def _problem(problem: Problem) -> Finding:
    place = f"{problem.file}:{problem.line}:{problem.col}" if problem.line else problem.file
    where = f"{problem.path}: " if problem.path else ""
    return Finding("config", "problem", f"{place}: {where}{problem.message}", problem.hint)


def _readable_secrets(loaded: Loaded) -> Iterator[Path]:
    """Yield the files with API keys in them that are not private: those of the configuration, and key files."""
    entries = loaded.servers.servers
    literal = {
        Path(loaded.sources[name].place("api_key").file)
        for name, spec in entries.items()
        if isinstance(spec.api_key, str) and "api_key" not in loaded.sources[name].hidden
    }
    files = {
        Path(spec.api_key.file)
        for spec in entries.values()
        if spec.api_key is not None and not isinstance(spec.api_key, str)
    }
    for path in sorted(literal | files):
        if path.exists() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            yield path


def _ports(scene: Scene) -> Iterator[Finding]:
    if scene.loaded is None:
        return
    servers = scene.loaded.servers
    ports = look_at_ports(servers.servers, servers.daemon, scene.daemon)
    taken = {**ports.servers, **({"the ops endpoint": ports.endpoint} if ports.endpoint else {})}
    for who, error in taken.items():
        yield Finding("ports", "problem", f"{who}: {error.message}", error.hint)
    kinds = ((ports.ours, "ours"), (ports.free, "free"))
    parts = [f"{' '.join(map(str, found))} {what}" for found, what in kinds if found]
    if parts:
        yield Finding("ports", "ok", ", ".join(parts))


def _state_folder(state: StateDir) -> Iterator[Finding]:
    root = state.root
    try:
        found = root.stat()
    except FileNotFoundError:
        above = next(it for it in root.parents if it.exists())
        if os.access(above, os.W_OK):
            yield Finding("state", "ok", f"{root} is not there yet, and can be made")
        else:
            yield Finding("state", "problem", f"{root} cannot be made: {above} is not writable")
        return
    except OSError as error:
        yield Finding("state", "problem", f"{root}: {error.strerror}")
        return
    fault, hint = judge_folder(found.st_mode, mine=found.st_uid == os.getuid())
    if fault is None and not os.access(root, os.W_OK | os.X_OK):
        fault, hint = "is not writable", f"chmod u+rwx {root}"
    if fault is None:
        yield Finding("state", "ok", f"{root}, mode {stat.S_IMODE(found.st_mode):04o}")
    else:
        yield Finding("state", "problem", f"{root} {fault}", hint and f"{hint} {root}")


def judge_folder(mode: int, *, mine: bool) -> tuple[str | None, str | None]:
    """Return what is wrong with a state folder, and the command that repairs it."""
    if not stat.S_ISDIR(mode):
        return "is no folder", None
    if not mine:
        return "belongs to somebody else", "name another with --state-dir, instead of"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by others, who could pose as the daemon", "chmod go-w"
    return None, None


def _daemon(scene: Scene) -> Finding:
    if scene.daemon is None:
        return _absent(scene.state)
    daemon, servers = scene.daemon["daemon"], scene.daemon["servers"]
    meant = [it for it in servers if it["desired"] == "running"]
    bad = [it for it in meant if it["state"] in ("failed", "blocked")]
    ready = sum(it["state"] == "ready" for it in meant)
    text = f"pid {daemon['pid']}, {ready} of {len(meant)} servers ready, config {scene.daemon['config']['state']}"
    if bad:
        states = "; ".join(f"{it['name']} is {it['state']}: {it['reason']}" for it in bad)
        return Finding("daemon", "problem", f"{text}; {states}", "`tqd status NAME` says more")
    if scene.daemon["config"]["state"] != "applied" or ready < len(meant):
        return Finding("daemon", "warn", text, "`tqd status` says more")
    return Finding("daemon", "ok", text)


def _absent(state: StateDir) -> Finding:
    owner = holder(state)
    if owner is not None:
        text = f"pid {owner.pid} holds {state.lock}, and does not answer on {owner.control}"
        return Finding("daemon", "problem", text, f"its log is {state.daemon_log}")
    if ended := hosts.refusal(state):
        text = f"not running: it ended for good at {ended.at}: {ended.message}"
        return Finding("daemon", "problem", text)
    return Finding("daemon", "ok", "not running", "`tqd start` starts it")


def _services() -> Iterator[Finding]:
    for scope in Scope:
        try:
            report = describe(scope)
        except TqdError as error:
            yield Finding("service", "warn", error.message, error.hint)
            continue
        if not report.installed:
            continue
        edited = ", edited by hand" if report.edited else ""
        text = f"{report.file}{edited}: {report.detail}"
        if report.problems:
            yield Finding("service", "problem", text, "; ".join(report.problems))
        elif not report.enabled:
            yield Finding("service", "warn", text, "it is not enabled: `tqd service install`")
        else:
            yield Finding("service", "ok", text)
