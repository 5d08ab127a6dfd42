"""What is known of the models that servers name: each is read once, however many servers use it.

A model whose files have gone, or are others, since a server of it was prepared is still known as it was
then: what runs of it has loaded them long ago.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from daemon.config.locate import (
    Located,
    fingerprint,
    locate,
    read_config,
    read_weights,
)
from daemon.config.spec import ServerSpec
from daemon.errors import PolicyError
from daemon.paths import hf_hub_dir
from daemon.policy.architecture import Architecture, read_architecture

Asked = tuple[str, str | None, Path]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a folder says about the model in it; *weights_bytes* is 0 without weights.

    *value_bytes* is the size of a number as the model computes.
    """

    folder: Path
    fingerprint: str
    architecture: Architecture
    weights_bytes: int
    value_bytes: int


class ArchitectureError(PolicyError):
    """The model's config.json describes no model that can be served."""


class Models:
    """The models of one run; *before* are those that servers were prepared with earlier."""

    def __init__(self, before: Iterable[tuple[ServerSpec, ModelFacts]] = ()) -> None:
        self._before = {_asked(spec): facts for spec, facts in before}
        self._read: dict[Located, ModelFacts] = {}

    def as_before(self, spec: ServerSpec, folder: Path) -> ServerSpec:
        """Return *spec*, written in a file of *folder*, with the path that its model was.

        A word such as ``models/x`` means a hub id where there is no such folder, and there is none any more.
        """
        _, revision, hub = _asked(spec)
        path = os.path.normpath(folder / spec.model)
        return (
            spec.model_copy(update={"model": path})
            if (path, revision, hub) in self._before
            else spec
        )

    def before(self, spec: ServerSpec) -> ModelFacts | None:
        """Return what was known of the model of *spec* earlier."""
        return self._before.get(_asked(spec))

    def read(self, spec: ServerSpec) -> ModelFacts:
        """Return what is known about the model of *spec* now.

        Raises:
            ModelMissingError, ModelFaultError: as daemon.config.locate says.
            ArchitectureError: it is no model that can be served.
        """
        model, revision, hub = _asked(spec)
        located = locate(model, revision, hub=hub)
        if located not in self._read:
            self._read[located] = _facts(located)
        return self._read[located]


def _asked(spec: ServerSpec) -> Asked:
    return spec.model, spec.revision, hf_hub_dir(spec.env)


def _facts(located: Located) -> ModelFacts:
    try:
        architecture = read_architecture(read_config(located.folder))
    except PolicyError as error:
        raise ArchitectureError(error.path, error.message, hint=error.hint) from error
    weights = read_weights(located.folder)
    return ModelFacts(
        located.folder,
        fingerprint(located, weights),
        architecture,
        weights.total_bytes,
        weights.value_bytes,
    )
