"""Commands that change what runs: run, shutdown, start, stop, restart, reload."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from daemon.cli.completion import servers
from daemon.cli.detached import start_daemon
from daemon.cli.hosts import record_refusal, service_of, start_service
from daemon.cli.waiting import wait
from daemon.errors import InProgressError, NotRunningError, TqdError
from daemon.supervisor import instance
from daemon.supervisor.client import Client
from daemon.supervisor.messages import Action, Verdict
from daemon.units import parse_duration

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings
    from daemon.ops.document import Document

POLL_S = 0.1

# What a service starts again for ever unless the daemon ends like this: launchd knows only "0 is fine",
# systemd has RestartPreventExitStatus=78.
_HOPELESS = {"launchd": 0, "systemd": 78}

Command = TypeVar("Command", bound=Callable[..., object])


def _duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _waits(command: Command) -> Command:
    """Add the options of a command that waits."""
    for option in (
        click.option("--no-wait", is_flag=True, help="Do not wait for it."),
        click.option(
            "--timeout",
            callback=_duration,
            default="10m",
            show_default=True,
            help="Wait at most this long; exit code 5 when it still goes on then.",
        ),
    ):
        command = option(command)
    return command


def _names(command: Command) -> Command:
    """Add the arguments that choose servers."""
    command = click.option("--all", "every", is_flag=True, help="All servers that are enabled.")(
        command
    )
    return click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=servers)(command)


@click.command()
@click.option(
    "--service",
    type=click.Choice(tuple(_HOPELESS)),
    help="Run for this service: end in the way that stops it from starting again where that cannot help.",
)
@click.option("--log-file", type=click.Path(path_type=Path), hidden=True)
@click.pass_obj
def run(settings: Settings, service: str | None, log_file: Path | None) -> None:
    """Run the daemon in the foreground.

    SIGTERM and SIGINT stop every server and end it, a second one without waiting for running requests.
    SIGHUP reads servers.yaml again.
    """
    from daemon.supervisor.main import Options, run  # keeps the other commands quick

    if service == "launchd" and log_file is None:
        log_file = settings.state.daemon_log  # launchd never rotates what it collects itself
    try:
        run(Options(settings.config, settings.state, log_file))
    except TqdError as error:  # only before it runs, and only what the user has to see to
        if service is None:
            raise
        record_refusal(settings.state, error)
        click.echo(f"tqd: {error}", err=True)
        sys.exit(_HOPELESS[service])


@click.command()
@_names
@_waits
@click.pass_obj
def start(
    settings: Settings, names: tuple[str, ...], every: bool, no_wait: bool, timeout: float
) -> None:
    """Start servers, and the daemon when it does not run.

    Without names, the servers that are meant to run.
    """
    client = Client(settings.state)
    until = time.monotonic() + timeout
    if not client.running():
        if found := service_of(settings.state):
            start_service(found, settings.config, settings.state, timeout)
        else:
            start_daemon(settings.config, settings.state, timeout)
    if names or every:
        before = client.act("start", None if every else names)
    else:
        servers = client.status()["servers"]
        before = {it["name"]: it["launch"] for it in servers if it["desired"] == "running"}
    _say_what_is_not_in_force(client.status())
    if not no_wait:
        wait(client, "start", before, max(until - time.monotonic(), 0.0))
        _say("started", before)
    if not before and not every:
        click.echo("every server is meant to be stopped; name one, or say --all", err=True)


@click.command()
@_names
@_waits
@click.pass_obj
def stop(
    settings: Settings, names: tuple[str, ...], every: bool, no_wait: bool, timeout: float
) -> None:
    """Stop servers: running requests finish, then the worker ends. The daemon goes on."""
    _change(settings, "stop", "stopped", names, every, no_wait, timeout)


@click.command()
@_names
@_waits
@click.pass_obj
def restart(
    settings: Settings, names: tuple[str, ...], every: bool, no_wait: bool, timeout: float
) -> None:
    """Restart servers with what is in force of servers.yaml."""
    _say_what_is_not_in_force(Client(settings.state).status())
    _change(settings, "restart", "restarted", names, every, no_wait, timeout)


def _say_what_is_not_in_force(document: Document) -> None:
    match document["config"]["state"]:
        case "pending":
            text = "servers.yaml has changes that are not in force; `tqd diff` shows them"
        case "rejected" | "stale":
            text = "servers.yaml was rejected, and what was in force before still is; `tqd status` says why"
        case _:
            return
    click.echo(f"tqd: {text}", err=True)


def _change(
    settings: Settings,
    action: Action,
    done: str,
    names: tuple[str, ...],
    every: bool,
    no_wait: bool,
    timeout: float,
) -> None:
    if not names and not every:
        raise click.UsageError("name the servers, or say --all")
    client = Client(settings.state)
    before = client.act(action, None if every else names)
    if not no_wait:
        wait(client, action, before, timeout)
        _say(done, before)


def _say(done: str, names: dict[str, int]) -> None:
    click.echo(f"{done}: {', '.join(names)}" if names else f"nothing to be {done}")


@click.command()
@_waits
@click.pass_obj
def shutdown(settings: Settings, no_wait: bool, timeout: float) -> None:
    """Stop every server and end the daemon. What is meant to run is not changed."""
    owner = instance.holder(settings.state)
    if owner is None:
        raise NotRunningError("the daemon is not running", hint="`tqd start` starts it")
    Client(settings.state).shut_down()
    until = time.monotonic() + timeout
    while not no_wait and instance.holder(settings.state) is not None:
        if time.monotonic() >= until:
            raise InProgressError(
                f"the daemon (pid {owner.pid}) still stops its servers after {timeout:.0f} s",
                hint="`tqd shutdown` once more ends the wait for running requests",
            )
        time.sleep(POLL_S)
    if not no_wait:
        click.echo("the daemon has ended")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.pass_obj
def reload(settings: Settings, as_json: bool) -> None:
    """Read servers.yaml again and apply it; exit code 2 when it is refused, and nothing changes."""
    verdict = Client(settings.state).reload()
    if as_json:
        click.echo(json.dumps(verdict, indent=2))
        return
    _print_verdict(verdict)


def _print_verdict(verdict: Verdict) -> None:
    for warning in verdict["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    if verdict["result"] == "unchanged" or not verdict["steps"]:
        click.echo("nothing has changed")
    for step in verdict["steps"]:
        click.echo(step["text"])


COMMANDS: tuple[click.Command, ...] = (run, shutdown, start, stop, restart, reload)
