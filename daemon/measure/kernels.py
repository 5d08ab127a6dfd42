"""Whether the kernels of this device agree with the reference, and how long they take beside MLX's own attention."""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import mlx.core as mx

from daemon.kernels import codec, encode, packing
from daemon.kernels.attention import Attention, on_this_device
from daemon.kernels.backend import Choice, backend_of_device, device_name
from daemon.kernels.case import Case
from daemon.kernels.packing import TILE, Packed, TileLayout
from daemon.kernels.stored import RawSide, Stored
from daemon.policy.schemes import FP16, SCHEMES, Codec, Scheme

CONTEXTS = (2048, 8192, 32768)  # tokens
TIMED = ("int8", "turbo8v4", "turbo4v4", "turbo4v3", "turbo0v4")

_SINKS, _TAIL = 4, 32
_AT_ONCE = 16  # calls in one evaluation, so that starting them does not count; on a CPU it counts for little
_ROUNDS = 5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What attends in one case, or packs in one layout, on this device; *reason*: why not the device's kernels."""

    case: str
    backend: str
    reason: str | None
    failed: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one layer's attention for one new token, packed, and in full precision by MLX's own."""

    scheme: str
    tokens: int
    packed_us: float
    plain_us: float

    @property
    def ratio(self) -> float:
        """How many times faster packed attention is."""
        return self.plain_us / self.packed_us


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Everything that `run` finds out."""

    device: str
    mlx: str
    agreements: tuple[Agreement, ...]
    packing: tuple[Agreement, ...]
    timings: tuple[Timing, ...]

    def as_json(self) -> dict[str, object]:
        """Return the report as plain lists and numbers."""
        timings = [{**asdict(timing), "ratio": round(timing.ratio, 3)} for timing in self.timings]
        return {**asdict(self), "timings": timings}


def run(
    say: Say,
    *,
    attention: Attention | None = None,
    cases: Sequence[Case] | None = None,
    schemes: Sequence[str] = TIMED,
    contexts: Sequence[int] = CONTEXTS,
    base: Case | None = None,
) -> KernelReport:
    """Prove every case and time some schemes on MLX's default device.

    Args:
        say: is told what happens next.
        attention: what to examine; None: what this device uses.
        cases: what to prove; None: every pair of codecs, and every other property once.
        schemes: what to time.
        contexts: how many tokens are attended to.
        base: heads, dims and dtype of what is timed; None: those of an 8B llama in float16, or in float32 on a
            CPU, whose float16 is slow.
    """
    attention = attention or on_this_device()
    shape = base or replace(_llama(), dtype=mx.float32 if _on_cpu() else mx.float16)
    asked = list(every_case() if cases is None else cases)
    agreements = [_agreement(str(case), partial(attention.choice, case), say) for case in asked]
    if attention.reads_prompts:
        agreements += [
            _agreement(f"prompts, {case}", partial(attention.prompt_choice, case), say)
            for case in asked
            if case.queries == 1
        ]
    layouts = dict.fromkeys(
        packing.native_layout(case.k, case.v, case.dim_k, case.dim_v) for case in asked
    )
    packed = [_agreement(_named(it), partial(encode.choice, it), say) for it in layouts]
    timings = []
    for tokens in contexts:
        for name in schemes:
            say(f"timing: {name} at {tokens:,} tokens")
            kinds = SCHEMES[name]
            timings.append(_timing(attention, replace(shape, k=kinds.k, v=kinds.v), name, tokens))
    return KernelReport(
        device_name(),
        importlib.metadata.version("mlx"),
        tuple(agreements),
        tuple(packed),
        tuple(timings),
    )


def every_case() -> Iterator[Case]:
    """Yield every pair of codecs, and turbo8v4 with every other property that selects a kernel."""
    base = _llama()
    for scheme in dict.fromkeys(SCHEMES.values()):  # int8 has two names
        if scheme.k != scheme.v or scheme.k is not FP16:
            yield replace(base, k=scheme.k, v=scheme.v)
    for dim in (64, 80, 96, 192, 256):
        yield replace(base, dim_k=dim, dim_v=dim)
    yield replace(base, dim_k=192)
    for queries in range(2, 9):
        yield replace(base, queries=queries)
    for n_heads in (8, 16, 56, 128):
        yield replace(base, n_heads=n_heads)
    for dtype in (mx.bfloat16, mx.float32):
        yield replace(base, dtype=dtype)
    yield replace(base, mask="boolean")
    yield replace(base, mask="additive")
    yield replace(base, learned_sinks=True)
    yield replace(base, scaled_keys=True)
    yield replace(base, scaled_keys=True, key_mean="constant")
    yield replace(base, scaled_keys=True, key_mean="rotary")


def _agreement(name: str, choose: Callable[[], Choice], say: Say) -> Agreement:
    say(f"comparing: {name}")
    choice = choose()
    return Agreement(name, choice.backend, choice.reason, choice.failed)


def _named(layout: TileLayout) -> str:
    return f"packing {Scheme(layout.k, layout.v).name}, {layout.dim_k}/{layout.dim_v} values"


def _llama() -> Case:
    kinds = SCHEMES["turbo8v4"]
    return Case(
        k=kinds.k,
        v=kinds.v,
        dim_k=128,
        dim_v=128,
        n_heads=32,
        n_kv_heads=8,
        queries=1,
        dtype=mx.float16,
    )


def _timing(attention: Attention, case: Case, name: str, tokens: int) -> Timing:
    scale = case.dim_k**-0.5
    stored = _stored(case, tokens)
    keys, values = (
        mx.random.normal((1, case.n_kv_heads, tokens, dim)).astype(case.dtype)
        for dim in (case.dim_k, case.dim_v)
    )
    queries = [
        mx.random.normal((case.n_heads, 1, case.dim_k)).astype(case.dtype)
        for _ in range(1 if _on_cpu() else _AT_ONCE)
    ]
    mx.eval(queries, keys, values, stored.tiles)
    return Timing(
        scheme=name,
        tokens=tokens,
        packed_us=_microseconds(
            lambda: [attention.attend(query, stored, scale, None, None) for query in queries]
        ),
        plain_us=_microseconds(
            lambda: [
                mx.fast.scaled_dot_product_attention(query[None], keys, values, scale=scale)
                for query in queries
            ]
        ),
    )


def _stored(case: Case, tokens: int) -> Stored:
    """Return *tokens* random tokens, some sinks and a tail in full precision."""
    layout = packing.native_layout(case.k, case.v, case.dim_k, case.dim_v)
    packed_to = (tokens - _TAIL) // TILE * TILE
    sides = [_side(case, kind, dim, tokens, packed_to) for kind, dim in _kinds(case)]
    (k, k_codes), (v, v_codes) = sides
    return Stored(
        layout=layout,
        length=tokens,
        packed_from=_SINKS,
        packed_to=packed_to,
        tiles=packing.pack(Packed(k_codes, v_codes), layout),
        k=k,
        v=v,
        n_kv_heads=case.n_kv_heads,
    )


def _kinds(case: Case) -> tuple[tuple[Codec, int], tuple[Codec, int]]:
    return (case.k, case.dim_k), (case.v, case.dim_v)


def _side(
    case: Case, kind: Codec, dim: int, tokens: int, packed_to: int
) -> tuple[RawSide, tuple[mx.array, mx.array] | None]:
    def plain(count: int) -> mx.array:
        return mx.random.normal((case.n_kv_heads, count, dim)).astype(case.dtype)

    if kind is FP16:
        return RawSide(head=plain(tokens), tail=None), None
    codes, scales = codec.encode(mx.random.normal((case.n_kv_heads, TILE, dim)), kind, "v")
    times = packed_to // TILE
    # the same tile again and again: what takes time is reading, whatever is read
    repeated = mx.tile(codes, (1, times, 1)), mx.tile(scales, (1, times))
    return RawSide(head=plain(_SINKS), tail=plain(tokens - packed_to)), repeated


def _microseconds(calls: Callable[[], list[mx.array]]) -> float:
    """Return the median time of one of *calls*."""
    made = calls()
    mx.eval(made)
    took = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        mx.eval(calls())
        took.append((time.perf_counter() - start) / len(made) * 1e6)
    return round(statistics.median(took), 1)


def _on_cpu() -> bool:
    return backend_of_device() == "cpu"
