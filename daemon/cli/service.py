"""`tqd service`: have launchd or systemd run the daemon."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from daemon.cli import hosts
from daemon.cli.service_paths import paths_for, try_out
from daemon.config.load import load
from daemon.errors import ConfigError, NotRunningError, TqdError
from daemon.paths import StateDir
from daemon.service.host import Host
from daemon.service.unit import Installed, Scope, decide, is_edited, stop_s
from daemon.supervisor.client import Client

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 900.0

_scope = click.option(
    "--system",
    "scope",
    flag_value=Scope.SYSTEM,
    default=Scope.USER,
    type=click.UNPROCESSED,
    help="The machine's services instead of your own: it starts with the machine. Needs root.",
)


@click.group()
def service() -> None:
    """Let launchd or systemd start the daemon and keep it running."""


@service.command()
@_scope
@click.option(
    "--run-as",
    metavar="USER",
    help="With --system: the account that runs it [default: who called sudo].",
)
@click.option("--no-start", is_flag=True, help="Do not start it now.")
@click.option("--dry-run", is_flag=True, help="Print the service's file, and change nothing.")
@click.pass_obj
def install(
    settings: Settings, scope: Scope, run_as: str | None, no_start: bool, dry_run: bool
) -> None:
    """Install the service for this servers.yaml and state folder; again: bring it up to date.

    A file that somebody has edited stays as it is; what tqd would write now is put beside it.
    """
    host = hosts.host(scope)
    paths, warning = paths_for(scope, run_as, config=settings.config, state=settings.state.root)
    rendered = host.render(paths)
    if warning:
        click.echo(f"warning: {warning}", err=True)
    if dry_run:
        click.echo(f"would write {host.path}:", err=True)
        click.echo(rendered, nl=False)
        return
    try_out(paths)
    _write(hosts.installed(scope), host, rendered, paths.state)
    host.install()
    state = StateDir(paths.state)
    if Client(state).running():
        click.echo("a daemon runs; this file is in force after `tqd shutdown` and `tqd start`")
    elif not no_start:
        found = hosts.Service(scope, host, rendered, host.read(rendered))
        hosts.start_service(found, paths.config, state, START_TIMEOUT_S)
        click.echo("started")
    if advice := host.advice():
        click.echo(advice)


def _write(found: hosts.Service | None, host: Host, rendered: str, state: Path) -> None:
    """Put the service's file in its place, unless somebody's edit is there."""
    if found is not None and found.runs.state not in (None, state):
        raise TqdError(
            f"{host.path} runs the daemon of {found.runs.state}",
            hint="one service each for a user and for the machine: `tqd service uninstall` first",
        )
    match decide(None if found is None else found.text, rendered):
        case "current":
            click.echo(f"{host.path} is up to date")
        case "edited" if found is not None:
            beside = host.path.with_name(f"{host.path.name}.new")
            _replace(beside, rendered)
            click.echo(
                f"{host.path} was edited by hand and stays as it is; {beside} is what tqd would write:"
            )
            lines, wanted = (it.splitlines(keepends=True) for it in (found.text, rendered))
            difference = difflib.unified_diff(lines, wanted, str(host.path), str(beside))
            click.echo("".join(difference), nl=False)
        case _:
            _replace(host.path, rendered)
            click.echo(f"wrote {host.path}")


def _replace(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> TqdError:
    hint = (
        "services of the machine are root's: use sudo"
        if isinstance(error, PermissionError)
        else None
    )
    return TqdError(f"{path} cannot be changed: {error.strerror}", hint=hint)


@service.command()
@_scope
def uninstall(scope: Scope) -> None:
    """Stop the service and remove its file. servers.yaml, the state folder and the logs stay."""
    found = hosts.installed(scope)
    if found is None:
        click.echo(f"not installed: there is no {hosts.host(scope).path}")
        return
    path = found.host.path
    found.host.remove(STOP_TIMEOUT_S)
    try:
        if is_edited(found.text):
            kept = path.with_name(f"{path.name}.saved")
            path.replace(kept)
            click.echo(f"your edited file is now {kept}")
        else:
            path.unlink()
    except OSError as error:
        raise _not_writable(path, error) from error
    found.host.forget()
    click.echo(f"removed {path}")


@service.command()
@_scope
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(scope: Scope, as_json: bool) -> None:
    """Say whether the service is installed, enabled, running and edited; exit code 3 when it does not run."""
    report = describe(scope)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    elif not report.installed:
        click.echo(f"not installed: there is no {report.file}; `tqd service install` writes it")
    else:
        for name, value in _rows(report):
            click.echo(f"{name:<9}{value}")
        for problem in report.problems:
            click.echo("problem: " + problem.replace("\n", "\n  "))
    if not report.running:
        sys.exit(NotRunningError.exit_code)


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """What there is to say about a service; *detail* is its host's own word for how it is."""

    installed: bool
    scope: str
    file: str
    edited: bool = False
    config: str | None = None
    state_dir: str | None = None
    enabled: bool = False
    running: bool = False
    pid: int | None = None
    detail: str = "not installed"
    problems: tuple[str, ...] = ()


def describe(scope: Scope) -> ServiceReport:
    """Return what there is to say about the service of *scope*."""
    found = hosts.installed(scope)
    if found is None:
        return ServiceReport(installed=False, scope=scope, file=str(hosts.host(scope).path))
    runs, condition = found.runs, found.host.condition()
    return ServiceReport(
        installed=True,
        scope=scope,
        file=str(found.host.path),
        edited=is_edited(found.text),
        config=None if runs.config is None else str(runs.config),
        state_dir=None if runs.state is None else str(runs.state),
        enabled=condition.enabled,
        running=condition.running,
        pid=condition.pid,
        detail=condition.detail,
        problems=tuple(_problems(runs)),
    )


def _problems(runs: Installed) -> Iterator[str]:
    """Yield what will keep the service from working as it should."""
    if runs.python is None or not runs.python.exists():
        yield f"its interpreter is gone: {runs.python}; `tqd service install` of another one repairs it"
    if runs.state is not None and (ended := hosts.refusal(StateDir(runs.state))):
        yield f"its daemon ended for good at {ended.at}: {ended.message}"
    if runs.config is None or runs.stop_s is None:
        return
    try:
        needed_s = stop_s(load(runs.config).servers.servers)
    except ConfigError as error:
        yield f"its configuration is broken: {error.problems[0]}"
    else:
        if needed_s > runs.stop_s:
            yield (
                f"a stop may take {needed_s} s now, and {runs.stop_s} s are given to it;"
                " `tqd service install` brings it up to date"
            )


def _rows(report: ServiceReport) -> Iterator[tuple[str, str]]:
    yield "file", f"{report.file}{' (edited by hand)' if report.edited else ''}"
    yield "runs", str(report.config)
    yield "state", str(report.state_dir)
    yield "enabled", "yes" if report.enabled else "no"
    pid = f", pid {report.pid}" if report.pid else ""
    yield "running", f"{'yes' if report.running else 'no'}{pid} ({report.detail})"


COMMANDS: tuple[click.Command, ...] = (service,)
