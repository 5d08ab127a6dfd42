"""What `tqd eval` and `tqd advise` are about: a server of servers.yaml, or a model of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daemon.config.load import Loaded, load
from daemon.config.locate import (
    Located,
    ModelFaultError,
    ModelMissingError,
    fingerprint,
    locate,
    read_config,
)
from daemon.config.spec import ServerSpec
from daemon.errors import PolicyError, TqdError, UnknownServerError
from daemon.paths import StateDir, hf_hub_dir
from daemon.policy.architecture import Architecture, read_architecture
from daemon.policy.evidence import allowance
from daemon.policy.spec import NamedPolicy
from daemon.policy.store import load_allowlist, load_policies


@dataclass(frozen=True, slots=True)
class Target:
    """A model, the server it is of if any, and the named policies that count for it."""

    model: str
    located: Located
    architecture: Architecture
    policies: Mapping[str, NamedPolicy]
    server: ServerSpec | None = None

    @property
    def fingerprint(self) -> str:
        """The identity of the model; raises TqdError where its weights are damaged or not complete."""
        return fingerprint(self.located)

    def allowed(self, state: StateDir, *, key_bits: float) -> str | None:
        """Return why keys of *key_bits* are allowed on this model; None: they are not."""
        try:
            identity = self.fingerprint
        except TqdError:  # without whole weights no entry for exactly this model can be meant
            identity = None
        return allowance(
            self.architecture.model_type,
            load_allowlist(state.allowlist),
            fingerprint=identity,
            key_bits=key_bits,
        )


def find(text: str, config: Path) -> Target:
    """Return what *text* names: a server of *config*, else a model's folder or hub id.

    Raises:
        ConfigError: *text* may name a server, and the configuration is broken.
        UnknownServerError: it names neither.
        TqdError: the model cannot be had, or is none that can be served.
    """
    folder = Path(text).expanduser()
    if "/" not in text and config.exists():
        loaded = load(config)
        if text in loaded.servers.servers:
            return _server(text, loaded)
    if folder.is_dir():
        model = str(folder.absolute())
        return _read(model, _located(model), load_policies().policies)
    if text.startswith((".", "/", "~")):
        raise TqdError(f"there is no folder {text}")
    if "/" in text:
        return _read(text, _located(text), load_policies().policies)
    raise UnknownServerError(
        f'"{text}" is neither a server nor the folder of a model',
        hint="name a server of servers.yaml, a folder, or a hub id such as org/model",
    )


def _server(name: str, loaded: Loaded) -> Target:
    spec = loaded.servers.servers[name]
    located = _located(spec.model, spec.revision, spec.env)
    model = loaded.sources[name].written("model") or spec.model
    return _read(model, located, loaded.policies, spec)


def _located(
    model: str, revision: str | None = None, env: Mapping[str, str] | None = None
) -> Located:
    """Return where *model* is; raises TqdError that names it."""
    try:
        return locate(model, revision, hub=hf_hub_dir(env))
    except ModelMissingError as error:
        raise TqdError(f"{model}: {error.message}", hint=error.hint) from error


def _read(
    model: str,
    located: Located,
    policies: Mapping[str, NamedPolicy],
    server: ServerSpec | None = None,
) -> Target:
    try:
        architecture = read_architecture(read_config(located.folder))
    except (PolicyError, ModelFaultError) as error:
        raise TqdError(f"{model}: {error.message}", hint=error.hint) from error
    return Target(model, located, architecture, policies, server)
