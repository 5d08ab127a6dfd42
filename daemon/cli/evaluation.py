"""`tqd eval` and `tqd advise`: what a KV policy costs in quality, and which one to try."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from filelock import FileLock

from daemon.cli import evaluation_tables as tables
from daemon.cli.completion import servers
from daemon.cli.measuring import measure, progress
from daemon.cli.target import Target, find
from daemon.config.evaluation import Contender, EvalJob, EvalReport
from daemon.errors import PolicyError, TqdError
from daemon.paths import StateDir
from daemon.policy import evidence
from daemon.policy.advise import advise as advice_for
from daemon.policy.request import request
from daemon.policy.rules import AllowEntry
from daemon.policy.schemes import TURBO4, UnknownSchemeError, parse_scheme
from daemon.policy.spec import KvSpec, NamedPolicy
from daemon.policy.store import load_entries, load_gate
from daemon.supervisor.environment import inherited, mlx_environment, openblas
from daemon.supervisor.files import make_private, write_private

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings

_LOCK_TIMEOUT_S = 30.0


@click.command()
@click.argument("target", metavar="SERVER|MODEL", shell_complete=servers)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def advise(settings: Settings, target: str, as_json: bool) -> None:
    """Suggest a KV policy for a server or a model, from its config.json alone.

    Advice only: nothing changes by itself. `tqd eval` measures what a policy costs.
    """
    found = find(target, settings.config)
    allowed = found.allowed(settings.state, key_bits=TURBO4.bits)
    advised = advice_for(found.architecture, found.policies, allowed=allowed)
    if as_json:
        click.echo(json.dumps({"model": found.model, **asdict(advised)}, indent=2))
    else:
        tables.print_advice(found.model, advised)


@click.command("eval")
@click.argument("target", metavar="SERVER|MODEL", shell_complete=servers)
@click.option(
    "--policy",
    "names",
    multiple=True,
    metavar="NAME|SCHEME",
    help="What to measure, may be repeated [default: the server's own, or balanced].",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plain text to measure on [default: the Python language documentation].",
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Windows of natural text, and of the copy test.",
)
@click.option(
    "--context",
    type=click.IntRange(64),
    default=1536,
    show_default=True,
    help="Prompt tokens of a window; a twelfth of it, at most 128, is scored.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the whole report here; - prints it instead of the table.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw divergence and bytes here, .png or .svg; needs tqd[plots].",
)
@click.option(
    "--record",
    is_flag=True,
    help="Allow the measured keys of 4 bits or fewer on this model, if they are within the gate.",
)
@click.pass_obj
def evaluate(
    settings: Settings,
    target: str,
    names: tuple[str, ...],
    text: Path | None,
    windows: int,
    context: int,
    json_file: Path | None,
    plot: Path | None,
    record: bool,
) -> None:
    """Measure how far KV policies move a model from its fp16 cache, and what they save.

    KL divergence, top-1 agreement and perplexity while decoding natural text and repeated text, recall of
    a sentence from a long context, and bytes of real buffers. The model is loaded here once more, beside a
    running server. The allow-list does not count: this is how evidence for it is made.
    """
    to_stdout = json_file is not None and str(json_file) == "-"
    if json_file is not None and not to_stdout and not json_file.absolute().parent.is_dir():
        raise TqdError(f"there is no folder {json_file.parent}")
    found = find(target, settings.config)
    job = EvalJob(
        model=found.model,
        model_path=str(found.located.folder),
        contenders=contenders(found, names),
        windows=windows,
        context=context,
        fingerprint=found.fingerprint,
        profiles=str(settings.state.profiles),
        text=str(text.absolute()) if text else None,
        plot=str(plot.absolute()) if plot else None,
    )
    click.echo(
        "the allow-list is ignored here: every policy is measured as it is written", err=True
    )
    report = _measured(job, found)
    document = report.model_dump_json(indent=2)
    if to_stdout:
        click.echo(document)
    else:
        tables.print_report(report)
    if json_file is not None and not to_stdout:
        _write_text(json_file, document + "\n")
    if plot is not None:
        click.echo(f"drew {plot}", err=True)
    if record:
        _record(report, found, settings.state)


def contenders(target: Target, names: Sequence[str]) -> tuple[Contender, ...]:
    """Return the policies that *names* mean for *target*; without names the server's own, or balanced.

    A scheme keeps the sinks, the tail and the boundary layers of the server's own `kv:` block.

    Raises:
        PolicyError: a name is neither a policy nor a scheme.
    """
    own = target.server.kv if target.server else KvSpec()
    if not names:
        kv = request(own, target.policies)
        label = (own.mode or f"k {kv.k}, v {kv.v}") if kv.explicit else kv.policy
        return (Contender(label=label, kv=kv),)
    return tuple(
        Contender(label=name, kv=request(_spec(own, name, target.policies), target.policies))
        for name in dict.fromkeys(names)
    )


def _spec(own: KvSpec, name: str, policies: Mapping[str, NamedPolicy]) -> KvSpec:
    if name in policies:
        return KvSpec(policy=name)
    try:
        parse_scheme(name)
    except UnknownSchemeError as error:
        raise PolicyError(
            "policy",
            f"--policy {name}: {error}",
            hint=f"{error.hint}; or a named policy: {', '.join(sorted(policies))}",
        ) from error
    nothing = {"k": None, "v": None, "cache_type_k": None, "cache_type_v": None, "layers": ()}
    return own.model_copy(update={"mode": name, **nothing})


def _measured(job: EvalJob, target: Target) -> EvalReport:
    server = target.server
    environ = mlx_environment(inherited(), preload=openblas()) | (server.env if server else {})
    with progress() as heard:
        result = measure(
            ["eval"],
            heard,
            document=job.model_dump_json(),
            python=server.python if server else None,
            environ=environ,
        )
    return EvalReport.model_validate(result)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TqdError(f"{path} cannot be written: {error.strerror}") from error


def _record(report: EvalReport, target: Target, state: StateDir) -> None:
    """Write an entry for every policy that needs one and is within the gate; raises for the others."""
    gate = load_gate()
    refused = []
    for policy in report.policies:
        measured = report.measured(policy)
        if policy.key_bits > TURBO4.bits:
            click.echo(f"{policy.label}: nothing to record, its keys need no allowance", err=True)
        elif objection := evidence.objection(measured, gate):
            refused.append(f"{policy.label} is over the gate: {objection}")
        else:
            _write(
                evidence.entry(
                    target.fingerprint,
                    policy.key_bits,
                    measured,
                    calibrated=policy.calibrated,
                ),
                state,
            )
            click.echo(
                f"recorded {policy.label} in {state.allowlist}; `tqd reload` puts it into force",
                err=True,
            )
    if refused:
        raise TqdError(
            "\n".join(["not recorded", *refused]),
            hint="measure a policy with more bits for keys, or more windows",
        )


def _write(new: AllowEntry, state: StateDir) -> None:
    make_private(state.root)
    with FileLock(state.root / "allowlist.lock", timeout=_LOCK_TIMEOUT_S, mode=0o600):
        entries = evidence.with_entry(load_entries(state.allowlist), new)
        write_private(state.allowlist, evidence.to_yaml(entries).encode())


COMMANDS: tuple[click.Command, ...] = (evaluate, advise)
