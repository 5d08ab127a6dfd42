"""A model's calibration profile: the measured mean and scale of its keys, stored once and shared.

One safetensors file per model and text, with its description in the metadata. A file that belongs to
another model, is damaged, or was written by another version is refused, never used by guess.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from daemon.cache.calibrate import KeyStatistics
from daemon.errors import TqdError

FORMAT = "tqd-key-profile"
VERSION = 2


class ProfileError(TqdError):
    """A calibration profile cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Profile:
    """The statistics of a model's cache slots by index, and what they were measured on."""

    fingerprint: str
    text: str
    tokens: int
    statistics: Mapping[int, KeyStatistics]

    @property
    def id(self) -> str:
        """A short name of the numbers themselves: caches packed with other numbers must not be mixed."""
        digest = hashlib.sha256()
        for index, entry in sorted(self.statistics.items()):
            digest.update((f"{index} constant" if entry.constant else str(index)).encode())
            for array in (entry.scale, entry.mean):
                digest.update(b"-" if array is None else np.array(array).tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write the profile to *path*, for its owner only; readers see the old file or the whole new one."""
        arrays = {}
        for index, entry in self.statistics.items():
            arrays[f"{index}.scale"] = entry.scale
            if entry.mean is not None:
                arrays[f"{index}.mean"] = entry.mean
        about = {
            "format": FORMAT,
            "version": str(VERSION),
            "fingerprint": self.fingerprint,
            "text": self.text,
            "tokens": str(self.tokens),
            "slots": json.dumps(
                {
                    index: {"constant": entry.constant, "note": entry.note}
                    for index, entry in self.statistics.items()
                }
            ),
            "id": self.id,
        }
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.stem}.new.safetensors")
        mx.save_safetensors(str(fresh), arrays, metadata=about)
        fresh.chmod(0o600)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(path)


def load(path: Path, fingerprint: str | None) -> Profile:
    """Return the profile in *path*, which must be of the model with *fingerprint*; None accepts any.

    Raises:
        ProfileError: the file is missing, damaged, of another version, or of another model.
    """
    again = "remove the file, and the next start measures again"
    try:
        loaded = cast(
            "tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True)
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ProfileError(
            f"cannot read the calibration profile {path}: {error}", hint=again
        ) from error
    arrays, about = loaded
    if about.get("format") != FORMAT or about.get("version") != str(VERSION):
        raise ProfileError(f"{path} is not a calibration profile of version {VERSION}", hint=again)
    if fingerprint is not None and about.get("fingerprint") != fingerprint:
        raise ProfileError(
            f"{path} is the calibration profile of another model",
            hint="name the profile of this model, or write calibration: auto",
        )
    try:
        profile = Profile(
            fingerprint=about["fingerprint"],
            text=about["text"],
            tokens=int(about["tokens"]),
            statistics={
                int(index): KeyStatistics(
                    arrays[f"{index}.scale"],
                    arrays.get(f"{index}.mean"),
                    constant=said["constant"],
                    note=said["note"],
                )
                for index, said in json.loads(about["slots"]).items()
            },
        )
        intact = profile.id == about["id"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"{path} is damaged: something in it is missing", hint=again) from error
    if not intact:
        raise ProfileError(f"{path} is damaged: its numbers are not those it names", hint=again)
    return profile
