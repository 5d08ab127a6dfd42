"""Pack the prompt cache of any mlx-lm model in one call: the code behind `quantize_prompt_cache`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from daemon.cache import build, calibrate, seam
from daemon.cache.build import CacheFactory
from daemon.cache.in_force import own_plans, put_in_force
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.errors import PolicyError
from daemon.kernels.attention import on_this_device
from daemon.kernels.keys import KeyTransform
from daemon.policy.architecture import Architecture, read_architecture
from daemon.policy.evidence import allowance
from daemon.policy.request import request
from daemon.policy.resolved import LayerPlan, ResolvedPolicy, summarize
from daemon.policy.schemes import UnknownSchemeError, parse_scheme
from daemon.policy.spec import KvSpec
from daemon.policy.store import load_allowlist, load_policies

_ONLY_A_SERVER = ("calibration", "budget")  # keys of a kv block without effect here


class PromptCache(list[Any]):
    """The caches of one model, in its order, and what each layer got.

    *policy* has a plan for every layer, with its requested and effective scheme and the reason where
    they differ, the warnings, and a summary.
    """

    def __init__(self, caches: Sequence[Any], policy: ResolvedPolicy) -> None:
        super().__init__(caches)
        self.policy = policy

    @property
    def reasons(self) -> dict[int, str]:
        """Why layers differ from what was asked, by layer index."""
        return {plan.index: plan.reason for plan in self.policy.layers if plan.reason is not None}

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all caches."""
        return sum(cache.nbytes for cache in self if not cache.empty())


def quantize_prompt_cache(
    model: Any,
    cache: Sequence[Any],
    policy: str | Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None,
    allowed: str | None,
) -> PromptCache:
    """See daemon.cache.quantize_prompt_cache."""
    if any(isinstance(each, SequenceCache | BatchCache) for each in build.parts(cache)):
        raise ValueError("the cache is packed already; start from make_prompt_cache(model)")
    architecture = read_model(model, config)
    if allowed is None:
        allowed = allowance(architecture.model_type, load_allowlist())
    asked = request(_spec(policy), load_policies().policies)
    resolved, factory, keys = put_in_force(
        asked,
        architecture,
        allowed=allowed,
        prove=lambda plans: _proved(model, plans),
        find_means=lambda found: _without_biases(model, found, architecture),
    )
    if len(cache) != len(factory.slots):
        raise ValueError(
            f"the cache has {len(cache)} parts and the model makes {len(factory.slots)}"
        )
    slots = build.with_keys(build.plan_slots(cache, factory.plans), keys, calibrate.CHECKPOINT)
    plans = [slot.plan for slot in slots]
    if asked.strict:
        _refuse_fallbacks(own_plans(resolved), plans)
    caches = build.convert_slots(cache, slots, on_this_device())
    return PromptCache(caches, _as_built(resolved, plans))


def _proved(model: Any, plans: Sequence[LayerPlan]) -> CacheFactory:
    seam.install()
    return build.probe(model, build.plan_caches(model, plans), build.vocab_size(model))


def _without_biases(
    model: Any, factory: CacheFactory, architecture: Architecture
) -> dict[int, KeyTransform]:
    """Return what takes the checkpoint's key biases off the keys: the one mean that needs no measurement."""
    if not factory.any_scaled_keys:
        return {}
    head_dims = {layer.index: layer.head_dim_k for layer in architecture.layers}
    means = calibrate.checkpoint_means(model, factory, head_dims)
    return calibrate.attach(model, factory, means) if means else {}


def read_model(model: Any, config: Mapping[str, Any] | None = None) -> Architecture:
    """Return the architecture of *model*, from *config* or from the arguments that mlx-lm made it with.

    Raises:
        PolicyError: they do not say enough.
    """
    if config is None:
        config = _arguments(model)
    try:
        return read_architecture(config)
    except PolicyError as error:
        raise PolicyError(
            error.path,
            error.message,
            hint=error.hint or "give the content of the model's config.json as config=",
        ) from error


def _arguments(model: Any) -> dict[str, Any]:
    given = next(
        (found for name in ("args", "config") if (found := getattr(model, name, None))), None
    )
    arguments = (
        {} if given is None else {name: _plain(value) for name, value in vars(given).items()}
    )
    model_type = arguments.get("model_type") or getattr(model, "model_type", None)
    return {**arguments, "model_type": model_type}


def _plain(value: object) -> object:
    """Return *value* as config.json held it: some models make classes of nested blocks."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def _spec(policy: str | Mapping[str, Any]) -> KvSpec:
    """Return the `kv:` block that *policy* means."""
    if isinstance(policy, str):
        names = load_policies().policies
        if policy in names:
            return KvSpec(policy=policy)
        try:
            parse_scheme(policy)
        except UnknownSchemeError as error:
            raise PolicyError(
                "policy",
                f'"{policy}" is neither a named policy ({", ".join(sorted(names))}) nor a scheme',
                hint=error.hint,
            ) from error
        return KvSpec(mode=policy)
    try:
        spec = KvSpec.model_validate(dict(policy))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise PolicyError(".".join(map(str, problem["loc"])), problem["msg"]) from error
    for name in _ONLY_A_SERVER:
        if getattr(spec, name) not in (None, "auto", "none"):
            raise PolicyError(name, "only a server of tqd does this", hint=f"leave {name} out")
    return spec


def _refuse_fallbacks(resolved: Sequence[LayerPlan], built: Sequence[LayerPlan]) -> None:
    wanted = {plan.index: (plan.effective, plan.token_budget) for plan in resolved}
    for plan in built:
        if (plan.effective, plan.token_budget) != wanted[plan.index]:
            raise PolicyError(
                "strict", f"layer {plan.index} falls back to {plan.effective.name}: {plan.reason}"
            )


def _as_built(resolved: ResolvedPolicy, built: Sequence[LayerPlan]) -> ResolvedPolicy:
    by_index = {plan.index: plan for plan in built}
    layers = tuple(by_index.get(plan.index, plan) for plan in resolved.layers)
    return ResolvedPolicy(layers, resolved.warnings, summarize(layers))
