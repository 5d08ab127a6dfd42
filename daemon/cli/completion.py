"""`tqd completion`: the shell's own completion, with the names of servers from servers.yaml."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from daemon import paths
from daemon.config.load import load
from daemon.errors import TqdError

PROGRAM = "tqd"
_VARIABLE = (
    "_TQD_COMPLETE"  # click's own name for it; the script sets it, `tqd` then only completes
)

_HOW = {
    "bash": "echo 'eval \"$(tqd completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(tqd completion zsh)\"' >> ~/.zshrc    (after compinit)",
    "fish": "tqd completion fish > ~/.config/fish/completions/tqd.fish",
}


@click.command(
    epilog="To have it in every new shell: \b\n\n" + "\n\n".join(_HOW.values()),
)
@click.argument("shell", type=click.Choice(tuple(_HOW)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete tqd's commands, options and servers."""
    kind = get_completion_class(shell)
    if kind is None:  # click knows all three
        raise ValueError(shell)
    click.echo(kind(context.find_root().command, {}, PROGRAM, _VARIABLE).source())


def servers(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the servers whose name begins with *incomplete*; none while servers.yaml is broken."""
    # while completing, no command runs: what was given is only here
    root = context.find_root().params
    try:
        found = load(paths.config_file(root.get("config"))).servers.servers
    except TqdError:
        return []
    given = context.params.get(parameter.name or "") or ()
    return [
        CompletionItem(name, help=spec.model)
        for name, spec in found.items()
        if name.startswith(incomplete) and name not in given
    ]


COMMANDS: tuple[click.Command, ...] = (completion,)
