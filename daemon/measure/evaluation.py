"""The task behind `tqd eval`: several policies on one model, each against mlx-lm's own caches.

The allow-list is ignored here, else nothing could ever be measured. Windows are decoded a few at a time,
so that memory does not grow with their number: the log-probabilities of a large vocabulary are big.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.utils import load as load_mlx_lm

from daemon.cache import build, seam
from daemon.cache.build import CacheFactory
from daemon.config.evaluation import (
    Contender,
    EvalJob,
    EvalReport,
    Figures,
    LayerRun,
    Needle,
    PolicyFigures,
    Served,
)
from daemon.config.locate import read_config
from daemon.errors import PolicyError, TqdError, first_line
from daemon.kernels.attention import on_this_device
from daemon.kernels.backend import device_name
from daemon.measure import divergence, footprint, needle, serving, texts
from daemon.measure.divergence import Scores, Window
from daemon.measure.texts import Passage
from daemon.policy.architecture import Architecture, read_architecture
from daemon.policy.resolved import ResolvedPolicy, summarize
from daemon.policy.schemes import REFERENCE_BITS, SCHEMES
from daemon.worker.caches import Subject, put_in_force

GROUP = 4  # windows decoded together
LONGEST_PLOTTED = 32768  # tokens

_SAMPLE_TOKENS = 32  # enough for every cache to have its shape

IGNORED = "the allow-list does not count here: this is how evidence for it is made"

Say = Callable[[str, float], None]
"""Told what is being done, and the share that is done already."""


@dataclass(frozen=True)
class Entrant:
    """A policy in force on the model: what makes its caches, and what each layer got."""

    label: str
    factory: CacheFactory
    policy: ResolvedPolicy
    sink_tokens: int
    tail_tokens: int
    calibration: str
    calibrated: bool


def run(job: EvalJob, say: Say) -> EvalReport:
    """Measure what *job* asks for.

    Raises:
        TqdError: the model or the text cannot be used.
        PolicyError: a policy does not fit the model.
    """
    text = texts.from_file(Path(job.text)) if job.text else texts.builtin()
    say("loading the model", 0)
    profiles = Path(job.profiles) if job.profiles else None
    subject = load(Path(job.model_path), fingerprint=job.fingerprint, profiles=profiles)
    prompt = _prompt_tokens(job.context, subject.architecture)
    plain = texts.natural(subject.tokenizer, text, prompt=prompt, count=job.windows)
    copies = texts.copies(subject.tokenizer, text, prompt=prompt, count=job.windows)
    entrants = [enter(subject, contender, say) for contender in job.contenders]

    progress = _Progress(
        say, 2 * job.windows * (len(entrants) + 2) + (len(needle.DEPTHS) + 1) * (len(entrants) + 1)
    )
    natural_scores = _scores(subject, plain, entrants, progress, "natural text")
    copy_scores = _scores(subject, copies, entrants, progress, "copy test")
    found = _needles(subject, plain[0], entrants, progress)
    served = _served(subject, plain[0], entrants, progress)
    contexts = _contexts(subject.architecture)
    sample = divergence.prefill_all(subject.model, plain[0].tokens[:_SAMPLE_TOKENS])
    costs = [footprint.footprint(entrant.factory.packed(sample), contexts) for entrant in entrants]
    return EvalReport(
        model=job.model,
        model_type=subject.architecture.model_type,
        text=text.name,
        windows=job.windows,
        prompt_tokens=plain[0].prompt,
        scored_tokens=plain[0].score,
        versions={name: importlib.metadata.version(name) for name in ("tqd", "mlx", "mlx-lm")},
        device=device_name(),
        platform=f"{platform.machine()} {platform.system()}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        contexts=contexts,
        context_bytes_fp16=costs[0].context_bytes_fp16,
        reference_needles=found[0],
        reference_served=served[0],
        policies=tuple(
            _figures(*parts)
            for parts in zip(
                entrants, natural_scores, copy_scores, found[1:], served[1:], costs, strict=True
            )
        ),
    )


def load(folder: Path, *, fingerprint: str | None = None, profiles: Path | None = None) -> Subject:
    """Return the model in *folder*; with its *fingerprint* calibration profiles are kept in *profiles*.

    Raises:
        TqdError: mlx-lm cannot load it, or it is no model that can be served.
    """
    try:
        architecture = read_architecture(read_config(folder))
    except PolicyError as error:
        raise TqdError(f"{folder.name}: {error.message}", hint=error.hint) from error
    seam.install()
    try:
        model, tokenizer = load_mlx_lm(str(folder))[:2]
    except (Exception, SystemExit) as error:
        said = f"mlx-lm cannot load {folder}: {first_line(error)}"
        raise TqdError(said, hint="download or convert the model again") from error
    vocab_size = build.vocab_size(model)
    return Subject(folder.name, model, tokenizer, architecture, vocab_size, fingerprint, profiles)


def enter(subject: Subject, contender: Contender, say: Say) -> Entrant:
    """Put the policy of *contender* in force on the model, as a worker would.

    Raises:
        PolicyError: it does not fit the model.
        WorkerExitError: the calibration that it names cannot be used.
    """
    caches = put_in_force(
        subject,
        contender.kv,
        allowed=IGNORED,
        batching=subject.architecture.batching,
        progress=lambda _: say("measuring the keys (once per model)", 0),
    )
    resolved, calibration = caches.resolved, caches.calibration
    factory = caches.factory.attended_by(on_this_device())
    built = {slot.plan.index: slot.plan for slot in factory.slots}
    layers = tuple(built.get(plan.index, plan) for plan in resolved.layers)
    return Entrant(
        label=contender.label,
        factory=factory,
        policy=ResolvedPolicy(
            layers,
            (*resolved.warnings, *([calibration.problem] if calibration.problem else [])),
            summarize(layers),
        ),
        sink_tokens=contender.kv.sink_tokens,
        tail_tokens=contender.kv.tail_tokens,
        calibration=calibration.source,
        calibrated=contender.kv.calibration != "none",
    )


class _Progress:
    """Counts what is done, in decoded windows."""

    def __init__(self, say: Say, total: int) -> None:
        self._say = say
        self._total = total
        self._done = 0

    def begin(self, what: str) -> None:
        self._say(what, self._done / self._total)

    def advance(self, count: int) -> None:
        self._done += count


def _prompt_tokens(asked: int, architecture: Architecture) -> int:
    """Return the prompt tokens of a window: *asked*, or what the model's context has room for."""
    longest = architecture.max_context
    if longest is None or asked + texts.scored(asked) <= longest:
        return asked
    return longest - texts.scored(longest)


def _contexts(architecture: Architecture) -> tuple[int, ...]:
    longest = min(architecture.max_context or LONGEST_PLOTTED, LONGEST_PLOTTED)
    lengths = [length for length in (2**power for power in range(9, 16)) if length < longest]
    return (*lengths, longest)


def _scores(
    subject: Subject,
    passages: Sequence[Passage],
    entrants: Sequence[Entrant],
    progress: _Progress,
    name: str,
) -> list[Scores]:
    """Return the scores of each entrant on all *passages*."""
    parts: list[list[Scores]] = [[] for _ in entrants]
    for group in _groups(passages):
        windows = []
        for passage in group:
            progress.begin(f"{name}: reading")
            windows.append(divergence.prefill(subject.model, passage))
            progress.advance(1)
        for index, got in enumerate(_decoded(subject, windows, entrants, progress, name)):
            parts[index].append(got)
    return [divergence.join(part) for part in parts]


def _decoded(
    subject: Subject,
    windows: Sequence[Window],
    entrants: Sequence[Entrant],
    progress: _Progress,
    name: str,
) -> Iterator[Scores]:
    targets = [window.tokens[1:] for window in windows]
    together = subject.architecture.batching != "alone"
    progress.begin(f"{name}: reference")
    reference = divergence.decode(subject.model, windows, divergence.exact, together=together)
    progress.advance(len(windows))
    for entrant in entrants:
        progress.begin(f"{name}: {entrant.label}")
        got = divergence.decode(subject.model, windows, entrant.factory.packed, together=together)
        yield divergence.compare(reference, got, targets)
        progress.advance(len(windows))


def _groups(passages: Sequence[Passage]) -> Iterator[Sequence[Passage]]:
    for start in range(0, len(passages), GROUP):
        yield passages[start : start + GROUP]


def _needles(
    subject: Subject, passage: Passage, entrants: Sequence[Entrant], progress: _Progress
) -> list[tuple[Needle, ...]]:
    """Return what the reference and each entrant found."""
    hidden = [
        needle.haystack(subject.tokenizer, passage.tokens, index)
        for index in range(len(needle.DEPTHS))
    ]
    contestants = [("reference", entrants[0].factory.stock)]
    contestants += [(entrant.label, entrant.factory) for entrant in entrants]
    found = []
    for name, make_caches in contestants:
        results = []
        for hay in hidden:
            progress.begin(f"needle: {name}")
            got = needle.find(subject.model, subject.tokenizer, hay, make_caches)
            results.append(Needle(depth=got.depth, fresh=got.fresh, continued=got.continued))
            progress.advance(1)
        found.append(tuple(results))
    return found


def _served(
    subject: Subject, passage: Passage, entrants: Sequence[Entrant], progress: _Progress
) -> list[Served]:
    """Return how fast mlx-lm's own caches and each entrant's are where a server uses them."""
    reference = entrants[0].factory.fall_back("to compare with")
    contestants = [("reference", reference)]
    contestants += [(entrant.label, entrant.factory) for entrant in entrants]
    results = []
    for name, factory in contestants:
        progress.begin(f"serving: {name}")
        batching = subject.architecture.batching
        results.append(serving.serve(subject.model, factory, batching, passage.tokens))
        progress.advance(1)
    return results


def _figures(
    entrant: Entrant,
    natural: Scores,
    copies: Scores,
    needles: tuple[Needle, ...],
    served: Served,
    cost: footprint.Footprint,
) -> PolicyFigures:
    packed = [
        plan.effective.k.precision
        for plan in entrant.policy.layers
        if plan.boundary is None and plan.effective != SCHEMES["fp16"]
    ]
    return PolicyFigures(
        label=entrant.label,
        summary=entrant.policy.summary,
        layers=tuple(
            LayerRun(
                first=group.first,
                last=group.last,
                kind=group.kind,
                requested=group.requested,
                effective=group.effective,
                reason=group.reason,
            )
            for group in entrant.policy.groups()
        ),
        warnings=tuple(text for text in entrant.policy.warnings if IGNORED not in text),
        sink_tokens=entrant.sink_tokens,
        tail_tokens=entrant.tail_tokens,
        calibration=entrant.calibration,
        calibrated=entrant.calibrated,
        key_bits=max(packed, default=REFERENCE_BITS),
        bits_per_value=cost.bits_per_value,
        bytes_per_token=cost.bytes_per_token,
        bytes_per_token_fp16=cost.bytes_per_token_fp16,
        context_bytes=cost.context_bytes,
        natural=_of(natural),
        copy_test=_of(copies),
        needles=needles,
        served=served,
    )


def _of(scores: Scores) -> Figures:
    got = divergence.summarize(scores)
    return Figures(
        positions=got.positions,
        kld_mean=got.mean,
        kld_standard_error=got.standard_error,
        kld_median=got.median,
        kld_p999=got.p999,
        top1_agreement=got.top1_agreement,
        perplexity=got.perplexity,
        reference_perplexity=got.reference_perplexity,
        perplexity_delta=got.perplexity_delta,
    )
