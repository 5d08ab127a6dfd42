"""`tqd pull`: the only command that fetches a model; everything else is offline."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from daemon.cli.completion import servers
from daemon.config.load import load
from daemon.config.locate import WEIGHT_FILES, Located, locate, read_weights
from daemon.config.spec import ServerSpec
from daemon.errors import TqdError, UnknownServerError
from daemon.paths import hf_hub_dir
from daemon.units import format_size

if TYPE_CHECKING:  # the group imports this module
    from daemon.cli.main import Settings

# What mlx-lm loads of a repository; programs are left out, because none that comes with a model is run.
FILES = (
    "*.json", WEIGHT_FILES, "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt", "*.jsonl", "*.jinja",
)  # fmt: skip


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=servers)
@click.option("--all", "every", is_flag=True, help="All servers that are enabled.")
@click.pass_obj
def pull(settings: Settings, names: tuple[str, ...], every: bool) -> None:
    """Fetch the models of servers from the Hugging Face hub into its local cache.

    Exactly the repository and revision that servers.yaml names. A connection that breaks is taken up where it
    broke; after an interruption, the same command fetches the files that are not whole.
    """
    known = load(settings.config).servers.servers
    if not names and not every:
        raise click.UsageError("name the servers, or say --all")
    if unknown := [name for name in names if name not in known]:
        raise UnknownServerError(
            f'no server is called "{unknown[0]}"', hint=f"one of {', '.join(known)}"
        )
    for name in names or [name for name, spec in known.items() if spec.enabled]:
        _pull(name, known[name])


def _pull(name: str, spec: ServerSpec) -> None:
    if Path(spec.model).is_absolute():
        click.echo(f"{name}: {spec.model} is a folder: nothing to fetch")
        return
    at = f" at {spec.revision}" if spec.revision else ""
    click.echo(f"{name}: {spec.model}{at} …", err=True)
    hub = hf_hub_dir(spec.env)
    _fetch(spec, hub)
    located = locate(spec.model, spec.revision, hub=hub)
    size = format_size(_whole(name, located))
    click.echo(f"{name}: {spec.model} is here, commit {located.commit}, weights {size}")


def _whole(name: str, located: Located) -> int:
    """Return the bytes of the weights that have arrived; raises TqdError where they are not a model."""
    weights = read_weights(located.folder)
    if not weights.files:
        raise TqdError(
            f"{name}: the repository holds no {WEIGHT_FILES}",
            hint="mlx-lm loads models in MLX or Hugging Face format; GGUF files are not among them",
        )
    return weights.total_bytes


def _fetch(spec: ServerSpec, hub: Path) -> None:
    """Bring the files of the model of *spec* into the cache folder *hub*.

    Raises:
        TqdError: the hub, or the way there, does not let us.
    """
    from huggingface_hub import snapshot_download  # slow to import, and needed only here
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        snapshot_download(
            spec.model,
            revision=spec.revision,
            cache_dir=hub,
            allow_patterns=list(FILES),
            token=_setting(spec.env, "HF_TOKEN"),
            endpoint=_setting(spec.env, "HF_ENDPOINT"),
        )
    except KeyboardInterrupt:
        click.echo(
            "interrupted; whole files are kept, and the same command fetches the rest", err=True
        )
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - each version of the library, and of its HTTP client, raises its own
        _explain(spec, error)


def _setting(env: Mapping[str, str], name: str) -> str | None:
    """Return what the server's own environment says; what this shell says, the library finds itself."""
    return env.get(name) or None


def _explain(spec: ServerSpec, error: Exception) -> NoReturn:
    """Raise what *error* means to the person who asked."""
    from huggingface_hub import errors

    what = f"{spec.model} at {spec.revision}" if spec.revision else spec.model
    match error:
        case errors.GatedRepoError():
            said, hint = "is gated", "accept its terms on its page, then `hf auth login`"
        case errors.RevisionNotFoundError():
            said, hint = (
                "is not there: no such revision",
                "`revision` is a branch, a tag or a commit",
            )
        case errors.RepositoryNotFoundError():
            said, hint = (
                "is not there, or is private",
                "check its name; `hf auth login` for private ones",
            )
        case errors.HFValidationError():
            said, hint = "is no hub id", "write org/model, or the path of a folder"
        case errors.LocalEntryNotFoundError():
            said, hint = (
                "is not here, and the hub cannot be reached",
                "HF_HUB_OFFLINE and HF_ENDPOINT decide where it is looked for",
            )
        case OSError() if error.errno is not None:
            said, hint = f"cannot be stored: {error.strerror}", "HF_HOME says where the cache is"
        case _:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            said, hint = (
                f"could not be fetched: {reason}",
                "whole files are kept; the same command fetches the rest",
            )
    raise TqdError(f"{what} {said}", hint=hint) from error


COMMANDS: tuple[click.Command, ...] = (pull,)
