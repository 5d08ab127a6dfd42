"""Decide what is taken off a model's keys: a stored profile, a new measurement, the checkpoint, or nothing.

Measured once per model and text, at its first load, and stored in the state folder, where every server
of that model finds it. Whatever goes wrong leaves the model serving without calibration, with the
reason in the status; under `kv.strict` it is an error.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from filelock import FileLock

from daemon.cache import calibrate, profile
from daemon.cache.build import CacheFactory
from daemon.cache.calibrate import KeyStatistics
from daemon.cache.profile import Profile, ProfileError
from daemon.errors import WorkerExit, WorkerExitError
from daemon.kernels.keys import KeyTransform
from daemon.policy import spec as policy
from daemon.policy.token_budgets import layers_text

RUNS = 2  # of calibrate.RUN_TOKENS tokens each: more changed nothing measurable
LIMIT_S = 180.0  # a machine that is slower than this serves uncalibrated
CHARACTERS = 24_000  # enough text for the tokens above in any tokenizer

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Calibration:
    """What each cache slot takes off its keys, and in words where that comes from."""

    transforms: Mapping[int, KeyTransform]
    source: str
    id: str | None = None
    problem: str | None = None

    @property
    def has_means(self) -> bool:
        """Whether the mean is taken off the keys of some layer."""
        return any(keys.mean is not None for keys in self.transforms.values())


@dataclass(frozen=True)
class Wanted:
    """What a server's `kv.calibration` and its model come to."""

    setting: policy.Calibration
    fingerprint: str | None
    folder: Path | None  # where profiles are kept
    strict: bool
    head_dims: Mapping[int, int]


class _TooSlowError(Exception):
    pass


def calibrated(
    model: Any, tokenizer: Any, factory: CacheFactory, wanted: Wanted, progress: Progress
) -> Calibration:
    """Return the calibration of *model*, measuring it where no profile is stored yet.

    Raises:
        WorkerExitError: a profile or text that servers.yaml names cannot be used, or, under strict,
            the measurement failed.
    """
    if not factory.any_scaled_keys:
        return Calibration({}, "not needed: no keys are rotated and packed")
    if wanted.setting == "none":
        return _from_checkpoint(model, factory, wanted, problem=None)
    try:
        stored = _stored_or_measured(model, tokenizer, factory, wanted, progress)
    except ProfileError as error:
        raise WorkerExitError(WorkerExit.BAD_CONFIG, error.message, hint=error.hint) from error
    except Exception as error:  # whatever a model's code does when it is watched, it still serves
        reason = (
            "it took too long"
            if isinstance(error, _TooSlowError)
            else f"{type(error).__name__}: {error}"
        )
        if wanted.strict:
            raise WorkerExitError(
                WorkerExit.BAD_CONFIG,
                f"kv.strict: calibration failed: {reason}",
                hint="write kv.calibration: none",
            ) from error
        return _from_checkpoint(model, factory, wanted, problem=f"calibration failed: {reason}")
    return Calibration(
        calibrate.attach(model, factory, stored.statistics),
        _told(stored, factory),
        id=stored.id,
    )


def _told(stored: Profile, factory: CacheFactory) -> str:
    """Return what *stored* was measured on, and in which layers its mean is the same at every position."""
    text = f"measured on {stored.tokens:,} tokens of {stored.text}"
    constant = {
        factory.slots[index].plan.index
        for index in _ours(factory)
        if (entry := stored.statistics.get(index)) is not None and entry.constant
    }
    if not constant:
        return text
    return f"{text}; the mean of {layers_text(sorted(constant))} does not rotate"


def _from_checkpoint(
    model: Any, factory: CacheFactory, wanted: Wanted, *, problem: str | None
) -> Calibration:
    means = calibrate.checkpoint_means(model, factory, wanted.head_dims)
    if not means:
        return Calibration({}, "none", problem=problem)
    return Calibration(
        calibrate.attach(model, factory, means),
        "the checkpoint's key biases",
        id=calibrate.CHECKPOINT,
        problem=problem,
    )


def _stored_or_measured(
    model: Any, tokenizer: Any, factory: CacheFactory, wanted: Wanted, progress: Progress
) -> Profile:
    setting = wanted.setting
    if not isinstance(setting, str) and setting.profile is not None:
        return profile.load(Path(setting.profile), wanted.fingerprint)
    name, text = _text(None if isinstance(setting, str) else setting.text)
    if wanted.folder is None or wanted.fingerprint is None:
        return _measured(model, tokenizer, factory, name, text, wanted, progress)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = wanted.folder / f"{wanted.fingerprint[:32]}-{digest}.safetensors"
    wanted.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), mode=0o600):
        if path.exists():
            with suppress(ProfileError):  # of an older version, or damaged: nobody named it
                known = profile.load(path, wanted.fingerprint)
                if set(known.statistics) >= _ours(factory):
                    return known
        fresh = _measured(model, tokenizer, factory, name, text, wanted, progress)
        fresh.save(path)
        return fresh


def _measured(
    model: Any,
    tokenizer: Any,
    factory: CacheFactory,
    name: str,
    text: str,
    wanted: Wanted,
    progress: Progress,
) -> Profile:
    runs = _runs(tokenizer.encode(text))
    deadline = time.monotonic() + LIMIT_S

    def on_time(share: float) -> None:
        if time.monotonic() > deadline:
            raise _TooSlowError
        progress(share)

    statistics: Mapping[int, KeyStatistics] = calibrate.calibrate(model, factory, runs, on_time)
    return Profile(wanted.fingerprint or "", name, sum(map(len, runs)), statistics)


def _runs(tokens: Sequence[int]) -> list[Sequence[int]]:
    size = calibrate.RUN_TOKENS
    return [tokens[start : start + size] for start in range(0, min(len(tokens), RUNS * size), size)]


def _text(written: str | None) -> tuple[str, str]:
    if written is not None:
        path = Path(written)
        try:
            return path.name, path.read_text(encoding="utf-8")[:CHARACTERS]
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"cannot read the calibration text {path}: {error}",
                hint="kv.calibration.text names a UTF-8 file",
            ) from error
    # prose that every Python brings along; sorted, so that it is the same everywhere
    return "Python's documentation", "\n\n".join(topics[key] for key in sorted(topics))[:CHARACTERS]


def _ours(factory: CacheFactory) -> set[int]:
    return {index for index, slot in enumerate(factory.slots) if slot.calibratable}
