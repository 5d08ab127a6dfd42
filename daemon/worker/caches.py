"""Put a KV policy in force on a loaded model: plan its caches, prove that they work, calibrate their keys.

A server and `tqd eval` do it alike, so what is measured is what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.cache import build, in_force
from daemon.cache.build import CacheFactory
from daemon.errors import WorkerExit, WorkerExitError, first_line
from daemon.policy.architecture import Architecture
from daemon.policy.resolved import LayerPlan, ResolvedPolicy
from daemon.policy.rules import Batching
from daemon.policy.spec import KvRequest
from daemon.worker.calibration import Calibration, Wanted, calibrated

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Subject:
    """The model that a policy is put in force on.

    *fingerprint* names it in the folder *profiles*, where its calibration is kept.
    """

    name: str
    model: Any
    tokenizer: Any
    architecture: Architecture
    vocab_size: int
    fingerprint: str | None = None
    profiles: Path | None = None


@dataclass(frozen=True)
class Caches:
    """What the policy came to, what makes the caches, and what is taken off their keys."""

    resolved: ResolvedPolicy
    factory: CacheFactory
    calibration: Calibration


def put_in_force(
    subject: Subject,
    kv: KvRequest,
    *,
    allowed: str | None,
    batching: Batching,
    progress: Progress,
) -> Caches:
    """Return the caches of *subject* under *kv*; *progress* hears the share of a calibration that is done.

    Raises:
        PolicyError: the policy does not fit the model.
        WorkerExitError: the model does not run here, or its calibration failed under `kv.strict`.
    """
    resolved, factory, calibration = in_force.put_in_force(
        kv,
        subject.architecture,
        allowed=allowed,
        prove=lambda plans: _proved(subject, plans, batching),
        find_means=lambda found: _calibrated(subject, kv, found, progress),
        any_means=lambda found: found.has_means,
    )
    return Caches(resolved, factory.calibrated(calibration.transforms, calibration.id), calibration)


def _proved(subject: Subject, plans: Sequence[LayerPlan], batching: Batching) -> CacheFactory:
    factory = build.plan_caches(subject.model, plans, batching=batching)
    try:
        return build.probe(subject.model, factory, subject.vocab_size)
    except Exception as error:
        said = f"mlx-lm cannot run {subject.name} here: {first_line(error)}"
        raise WorkerExitError(WorkerExit.BAD_CONFIG, said) from error


def _calibrated(
    subject: Subject, kv: KvRequest, factory: CacheFactory, progress: Progress
) -> Calibration:
    wanted = Wanted(
        setting=kv.calibration,
        fingerprint=subject.fingerprint,
        folder=subject.profiles,
        strict=kv.strict,
        head_dims={layer.index: layer.head_dim_k for layer in subject.architecture.layers},
    )
    return calibrated(subject.model, subject.tokenizer, factory, wanted, progress)
