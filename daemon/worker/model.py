"""Load a model for serving: weights, tokenizer, caches under the policy, and the proof that they work.

Runs on the MLX thread. Every way in which a folder can be unfit becomes one WorkerExitError that says
what is wrong with it.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, load_tokenizer

from daemon.cache import backends, build, cost, seam
from daemon.cache.build import CacheFactory
from daemon.config import wire
from daemon.errors import PolicyError, WorkerExit, WorkerExitError, first_line
from daemon.kernels.attention import on_this_device
from daemon.kernels.backend import device_name
from daemon.policy.architecture import Architecture, read_architecture
from daemon.policy.budget import EXACT_BYTES
from daemon.policy.claim import padded, sequence_cost
from daemon.policy.resolve import resolve
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.rules import Batching, architectures
from daemon.worker.admission import Costs
from daemon.worker.caches import Subject, put_in_force
from daemon.worker.kv_report import as_built, kv_report

Progress = Callable[[str, float], None]

UNKNOWN_CONTEXT = 8192  # tokens, for the few configs that state no limit
_CHUNK_BYTES = 256 * 2**20  # weights read between two progress reports


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate."""

    model: Any
    tokenizer: Any
    factory: CacheFactory
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    batching: Batching
    costs: Costs
    model_report: wire.ModelReport
    kv_report: wire.KvReport


def load(spec: wire.WorkerSpec, progress: Progress) -> LoadedModel:
    """Load the model that *spec* names and put its KV policy in force.

    Raises:
        WorkerExitError: the folder is missing, incomplete or corrupt, or the policy does not fit the model.
    """
    folder = Path(spec.model_path)
    config = _read_config(folder)
    try:
        architecture = read_architecture(config)
        # before gigabytes are read
        resolve(spec.kv, architecture, allowed=spec.allowed_low_bit_keys)
    except PolicyError as error:
        raise WorkerExitError(
            WorkerExit.BAD_CONFIG, f"{folder.name}: {error.message}", hint=error.hint
        ) from error
    seam.install()
    progress("reading weights", 0.0)
    model, config = _load_weights(folder, architecture)
    for done in _evaluated(model):
        progress("reading weights", 0.8 * done)
    progress("loading the tokenizer", 0.8)
    tokenizer = _load_tokenizer(folder, spec, config)
    progress("checking the KV policy", 0.85)
    vocab_size = build.vocab_size(model)
    caches = put_in_force(
        Subject(
            name=folder.name,
            model=model,
            tokenizer=tokenizer,
            architecture=architecture,
            vocab_size=vocab_size,
            fingerprint=spec.fingerprint,
            profiles=Path(spec.profiles) if spec.profiles else None,
        ),
        spec.kv,
        allowed=spec.allowed_low_bit_keys,
        batching=architecture.batching,
        progress=lambda share: progress("measuring the keys (once per model)", 0.85 + 0.15 * share),
    )
    resolved, factory = caches.resolved, caches.factory
    bytes_per_token = cost.measure(model, factory)
    attention = on_this_device()
    chosen = backends.choices(model, factory, attention, rows=spec.server.max_concurrent)
    factory = factory.attended_by(attention)
    built = as_built(resolved, factory)
    report = kv_report(spec.kv, built, factory, chosen, bytes_per_token, caches.calibration)
    if spec.kv.strict:
        _refuse_fallbacks(resolved, factory)
        _refuse_lost_budgets(resolved, factory)
    model.make_cache = factory
    mx.clear_cache()
    own_context = architecture.max_context or UNKNOWN_CONTEXT
    max_context = min(spec.server.max_context or own_context, own_context)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        factory=factory,
        vocab_size=vocab_size,
        max_context=max_context,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        batching=architecture.batching,
        costs=Costs(
            sequence_cost(built, architecture, _value_bytes(model)),
            padded=padded(built),
            reading_tokens=max_context,
        ),
        model_report=_model_report(spec, folder, model, architecture),
        kv_report=report,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise WorkerExitError(
            WorkerExit.MODEL_MISSING, f"there is no model in {folder}: config.json is missing"
        ) from error
    except (OSError, ValueError) as error:
        raise WorkerExitError(WorkerExit.BAD_CONFIG, f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise WorkerExitError(WorkerExit.BAD_CONFIG, f"{path} does not hold a JSON object")
    return config


def _load_weights(folder: Path, architecture: Architecture) -> tuple[Any, dict[str, Any]]:
    download_again = "download or convert the model again"
    # mlx-lm knows its own names for a family and no other spelling
    respelled = architecture.model_type in architectures().spellings
    try:
        model, config = load_model(
            folder,
            lazy=True,
            model_config={"model_type": architecture.family} if respelled else None,
        )
    except FileNotFoundError as error:
        raise WorkerExitError(
            WorkerExit.MODEL_MISSING,
            f"{folder} has no weights (model*.safetensors)",
            hint=download_again,
        ) from error
    except (
        Exception,
        SystemExit,
    ) as error:  # SystemExit: mlx_lm.models.olmo exits where its package is missing
        raise WorkerExitError(
            WorkerExit.BAD_CONFIG,
            f"mlx-lm cannot load {folder}: {first_line(error)}",
            hint=download_again,
        ) from error
    return model, config


def _weights(model: Any) -> list[mx.array]:
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return [array for _, array in flat]


def _evaluated(model: Any) -> Iterator[float]:
    """Bring the weights into memory piece by piece; yield the share that is there."""
    arrays = _weights(model)
    total = sum(array.nbytes for array in arrays) or 1
    done = pending = 0
    batch: list[mx.array] = []
    for array in arrays:
        batch.append(array)
        pending += array.nbytes
        if pending >= _CHUNK_BYTES:
            mx.eval(batch)
            done, pending, batch = done + pending, 0, []
            yield done / total
    mx.eval(batch)
    yield 1.0


def _load_tokenizer(folder: Path, spec: wire.WorkerSpec, config: dict[str, Any]) -> Any:
    try:
        tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:
        raise WorkerExitError(
            WorkerExit.BAD_CONFIG, f"cannot load the tokenizer of {folder}: {first_line(error)}"
        ) from error
    if spec.server.chat_template is not None:
        path = Path(spec.server.chat_template)
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WorkerExitError(
                WorkerExit.BAD_CONFIG, f"cannot read the chat template {path}: {first_line(error)}"
            ) from error
    return tokenizer


def _value_bytes(model: Any) -> int:
    """Return the size of a number as the model computes: of most of its floating-point weights."""
    counted: Counter[int] = Counter()
    for array in _weights(model):
        if mx.issubdtype(array.dtype, mx.floating):
            counted[array.dtype.size] += array.nbytes
    return counted.most_common(1)[0][0] if counted else EXACT_BYTES


def _refuse_fallbacks(resolved: ResolvedPolicy, factory: CacheFactory) -> None:
    """Refuse what the loaded model cannot have; what its architecture rules out, `resolve` has refused already."""
    wanted = {plan.index: plan.effective.name for plan in resolved.layers}
    missed = {
        plan.index: f"layer {plan.index} gets {plan.effective.name} instead of {wanted[plan.index]}: {plan.reason}"
        for plan in factory.plans
        if plan.effective.name != wanted[plan.index]
    }
    if missed:
        raise WorkerExitError(
            WorkerExit.BAD_CONFIG,
            f"kv.strict: {'; '.join(missed.values())}",
            hint="choose a scheme these layers can have, or drop kv.strict",
        )


def _refuse_lost_budgets(resolved: ResolvedPolicy, factory: CacheFactory) -> None:
    budgeted = {plan.index for plan in resolved.layers if plan.token_budget is not None}
    for plan in factory.plans:
        if plan.index in budgeted and plan.token_budget is None:
            raise WorkerExitError(
                WorkerExit.BAD_CONFIG,
                f"kv.strict: layer {plan.index} cannot have its token_budget: {plan.reason}",
                hint="drop the token_budget of this layer, or kv.strict",
            )


def _model_report(
    spec: wire.WorkerSpec, folder: Path, model: Any, architecture: Architecture
) -> wire.ModelReport:
    return wire.ModelReport(
        id=spec.server.model,
        path=str(folder),
        model_type=architecture.model_type,
        layers=len(architecture.layers),
        max_context=architecture.max_context or UNKNOWN_CONTEXT,
        weights_bytes=sum(array.nbytes for array in _weights(model)),
        device=device_name(),
        mlx_version=importlib.metadata.version("mlx"),
        mlx_lm_version=importlib.metadata.version("mlx-lm"),
    )
