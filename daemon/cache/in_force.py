"""Put a KV policy in force on a loaded model; a server, `tqd eval` and `quantize_prompt_cache` do it alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from daemon.cache.build import CacheFactory
from daemon.policy.architecture import Architecture, LayerKind
from daemon.policy.resolve import resolve
from daemon.policy.resolved import LayerPlan, ResolvedPolicy
from daemon.policy.spec import KvRequest

Means = TypeVar("Means")


def put_in_force(
    kv: KvRequest,
    architecture: Architecture,
    *,
    allowed: str | None,
    prove: Callable[[Sequence[LayerPlan]], CacheFactory],
    find_means: Callable[[CacheFactory], Means],
    any_means: Callable[[Means], bool] = bool,
) -> tuple[ResolvedPolicy, CacheFactory, Means]:
    """Return what *kv* comes to, the factory of the caches, and the means that are taken off their keys.

    *prove* makes a factory of the plans of all layers that have a cache, and tries it; whatever it or
    *find_means* raises is raised here.

    Raises:
        PolicyError: the policy does not fit the model.
    """
    resolved = resolve(kv, architecture, allowed=allowed)
    factory = prove(own_plans(resolved))
    means = find_means(factory)
    if not any_means(means) and architecture.boundary_k:
        # what `boundary_k: auto` is for: keys of this family that keep their mean
        resolved = resolve(kv, architecture, allowed=allowed, key_means=False)
        factory = prove(own_plans(resolved))
    return resolved, factory, means


def own_plans(resolved: ResolvedPolicy) -> list[LayerPlan]:
    """Return the plans of the layers that have a cache of their own."""
    return [plan for plan in resolved.layers if plan.kind is not LayerKind.SHARED]
