"""What a loaded model tells about its KV caches: schemes, backends, reasons, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from daemon.cache.backends import MLX, Backends
from daemon.cache.build import CacheFactory
from daemon.cache.cost import BytesPerToken
from daemon.config import wire
from daemon.kernels.backend import Choice
from daemon.policy.resolved import LayerGroup, ResolvedPolicy, summarize
from daemon.policy.spec import KvRequest
from daemon.worker.calibration import Calibration


def as_built(resolved: ResolvedPolicy, factory: CacheFactory) -> ResolvedPolicy:
    """Return *resolved* as the loaded model got it."""
    built = {slot.plan.index: slot.plan for slot in factory.slots}
    plans = tuple(built.get(plan.index, plan) for plan in resolved.layers)
    return ResolvedPolicy(layers=plans, warnings=resolved.warnings, summary=summarize(plans))


def kv_report(
    asked: KvRequest,
    final: ResolvedPolicy,
    factory: CacheFactory,
    chosen: Sequence[Backends],
    cost: BytesPerToken,
    calibration: Calibration,
) -> wire.KvReport:
    """Return the policy *final*, as built, layer by layer; *chosen* is what serves each slot of *factory*."""
    attending, packing = [it.attention for it in chosen], [it.packing for it in chosen]
    by_layer = {slot.plan.index: its for slot, its in zip(factory.slots, chosen, strict=True)}
    problems = [calibration.problem] if calibration.problem else []
    return wire.KvReport(
        policy=asked.policy,
        summary=final.summary,
        layers=tuple(
            report for group in final.groups() for report in _layer_reports(group, by_layer)
        ),
        effective=dict(final.effective_counts),
        warnings=(*final.warnings, *problems, *_failures([*attending, *packing])),
        calibration=calibration.source,
        sink_tokens=asked.sink_tokens,
        tail_tokens=asked.tail_tokens,
        backend=_names(attending),
        packing_backend=_names(packing),
        bytes_per_token=cost.effective,
        bytes_per_token_fp16=cost.fp16,
    )


def _layer_reports(group: LayerGroup, chosen: Mapping[int, Backends]) -> Iterator[wire.LayerReport]:
    """Yield what *group* is, in runs of layers that the same backends serve."""
    layers = range(group.first, group.last + 1)
    for backends, run in groupby(layers, key=lambda layer: chosen.get(layer, MLX)):
        members = list(run)
        yield wire.LayerReport(
            first=members[0],
            last=members[-1],
            kind=group.kind,
            requested=group.requested,
            effective=group.effective,
            reason=group.reason,
            backend=backends.attention.backend,
            backend_reason=backends.attention.reason,
            packing_backend=backends.packing.backend,
            packing_reason=backends.packing.reason,
        )


def _names(chosen: Sequence[Choice]) -> str:
    """Return the backends of packed layers, the most frequent first."""
    counts = Counter(choice.backend for choice in chosen if choice.backend != "mlx")
    return ", ".join(name for name, _ in counts.most_common()) or "mlx"


def _failures(chosen: Sequence[Choice]) -> list[str]:
    """Return one warning for each way in which kernels failed."""
    failed = dict.fromkeys((choice.reason, choice.fused) for choice in chosen if choice.failed)
    return [
        f"{reason}; {'rows are decoded one by one' if fused else 'the reference runs'} instead, which is slower"
        for reason, fused in failed
    ]
