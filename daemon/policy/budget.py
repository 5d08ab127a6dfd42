"""What a policy costs in bytes: plain arithmetic over the layers, before anything is loaded.

The numbers are those of full buffers. A running worker reports what its buffers really hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from daemon.policy.architecture import Architecture, Layer, LayerKind
from daemon.policy.matching import TILE_TOKENS
from daemon.policy.resolved import LayerPlan, ResolvedPolicy
from daemon.policy.schemes import FP16, Codec, Scheme

_EXACT = Scheme(FP16, FP16)
EXACT_BYTES = 2  # of one value in a 16-bit cache

_LEAST_SPARE, _MOST_SPARE = 8, 32  # tiles
_PLACES = 4  # that a layer can have among those that grow at different times


@dataclass(frozen=True, slots=True)
class KvCost:
    """What one token more of context costs once a sequence is long, and what never grows.

    The first two count the layers that keep every token. *window_bytes* is the most that all layers
    with a window or a token budget keep for one sequence; *constant_layers* keep a state whose size only the loaded
    model knows, the same for every context length.
    """

    bytes_per_token: float
    bytes_per_token_fp16: float
    window_bytes: int
    constant_layers: int

    @property
    def compression(self) -> float:
        """How many times smaller a token is than in a 16-bit cache; 1 where nothing grows."""
        return self.bytes_per_token_fp16 / self.bytes_per_token if self.bytes_per_token else 1.0


def kv_cost(policy: ResolvedPolicy, arch: Architecture) -> KvCost:
    """Return what a token costs under *policy*, and in a 16-bit cache."""
    pairs = list(zip(policy.layers, arch.layers, strict=True))
    growing = [(plan, layer) for plan, layer in pairs if layer.grows and not plan.token_budget]
    bounded = [
        _layer_bytes(plan, layer, layer.window or plan.token_budget or 0) for plan, layer in pairs
    ]
    return KvCost(
        bytes_per_token=sum(_token_bytes(layer, plan.effective) for plan, layer in growing),
        bytes_per_token_fp16=sum(_token_bytes(layer, _EXACT) for _, layer in growing),
        window_bytes=sum(bounded),
        constant_layers=sum(layer.kind is LayerKind.RECURRENT for layer in arch.layers),
    )


def kv_bytes(
    policy: ResolvedPolicy,
    arch: Architecture,
    *,
    context_tokens: int,
    sequences: int = 1,
    value_bytes: int = EXACT_BYTES,
) -> int:
    """Return the bytes of *sequences* live sequences of *context_tokens* each.

    What is in full precision, such as sinks and the tail at its fullest, has *value_bytes* a value: those
    of the model's own numbers. Layers with a window or a token budget keep no more than it; the states of
    recurrent layers, which do not grow, are left out.
    """
    pairs = zip(policy.layers, arch.layers, strict=True)
    return sequences * sum(
        _layer_bytes(plan, layer, context_tokens, value_bytes) for plan, layer in pairs
    )


def spare_tiles(tiles: int, place: int = _PLACES - 1) -> int:
    """Return for how many more than *tiles* a buffer makes room when it grows to that; the most without a *place*.

    Growing copies the history, so it must be rare beside the steps that read it; some thousand tokens are rare
    enough at any length. *place* is the layer's number: a part of a model's layers grow in one step, because all
    at once need twice the memory for a moment, and one by one make every fold another graph for CUDA to prepare.
    """
    spare = min(max(_LEAST_SPARE, tiles // 4), _MOST_SPARE)
    return spare * (_PLACES + place % _PLACES) // (_PLACES + 2)


def spare_bytes(policy: ResolvedPolicy, arch: Architecture, *, context_tokens: int) -> int:
    """Return what the room in the tiles of one sequence may take that its *context_tokens* do not fill."""
    total = 0.0
    for plan, layer in zip(policy.layers, arch.layers, strict=True):
        if layer.window is not None or layer.kind in (LayerKind.RECURRENT, LayerKind.SHARED):
            continue
        kept = min(context_tokens, plan.token_budget or context_tokens)
        sides = (plan.effective.k, layer.head_dim_k), (plan.effective.v, layer.head_dim_v)
        vectors = sum(codec.vector_bytes(dim) for codec, dim in sides if codec != FP16)
        tokens = spare_tiles(-(-kept // TILE_TOKENS)) * TILE_TOKENS
        total += tokens * layer.n_kv_heads * vectors
    return round(total)


def weights_bytes(folder: Path) -> int:
    """Return the size of the safetensors files of a model's *folder*; 0 when it has none."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def longest_context(cost_bytes: Callable[[int], int], *, free_bytes: int, most_tokens: int) -> int:
    """Return the longest context, up to *most_tokens*, of which one sequence fits *free_bytes*.

    *cost_bytes* says what a sequence of so many tokens takes, and never falls. The answer is 0 or a whole
    number of tiles, unless it is *most_tokens* itself.
    """
    if cost_bytes(most_tokens) <= free_bytes:
        return most_tokens
    low, high = 0, most_tokens // TILE_TOKENS  # in tiles; low fits, more than high does not
    while low < high:
        middle = (low + high + 1) // 2
        if cost_bytes(middle * TILE_TOKENS) <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return low * TILE_TOKENS


def _layer_bytes(plan: LayerPlan, layer: Layer, tokens: int, value_bytes: int = EXACT_BYTES) -> int:
    if layer.kind in (LayerKind.RECURRENT, LayerKind.SHARED):
        return 0
    if layer.window is not None:
        return _exact_bytes(layer, min(tokens, layer.window), value_bytes)
    if plan.token_budget is not None:
        tokens = min(tokens, plan.token_budget)
    if plan.effective == _EXACT:
        return _exact_bytes(layer, tokens, value_bytes)
    tail, fold = plan.tail_tokens, plan.fold_tokens
    # without a tail every token is packed at once, else whole folds once the tail is full
    packed_tokens = max(0, tokens - tail) // fold * fold if tail else tokens
    packed = -(-packed_tokens // TILE_TOKENS)
    fullest = min(tokens, tail + fold - 1) if tail else 0
    # the slots of sink tokens stay unused in their tile, so that pages do not depend on the sinks
    exact_tokens = min(tokens, fullest + plan.sink_tokens)
    packed_bytes = packed * TILE_TOKENS * _token_bytes(layer, plan.effective, value_bytes)
    held = round(packed_bytes) + _exact_bytes(layer, exact_tokens, value_bytes)
    # until it is decoded, a short prompt is not packed
    return max(held, _exact_bytes(layer, min(tokens, plan.exact_prompt), value_bytes))


def _token_bytes(layer: Layer, scheme: Scheme, value_bytes: int = EXACT_BYTES) -> float:
    """Return the bytes of one token in *layer*, its scales and an indexer's keys included."""
    vectors = _vector_bytes(scheme.k, layer.head_dim_k, value_bytes) + _vector_bytes(
        scheme.v, layer.head_dim_v, value_bytes
    )
    return layer.n_kv_heads * vectors + layer.indexer_dim * value_bytes


def _vector_bytes(codec: Codec, dim: int, value_bytes: int) -> float:
    return dim * value_bytes if codec == FP16 else codec.vector_bytes(dim)


def _exact_bytes(layer: Layer, tokens: int, value_bytes: int) -> int:
    return round(tokens * _token_bytes(layer, _EXACT, value_bytes))
