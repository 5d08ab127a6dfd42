"""From a config.json to the layers of a model: what each one caches, and how large its vectors are.

Everything is decided by config.json and policies/architectures.yaml, which says what mlx-lm's model
modules do with it. The layers come in the order of the caches that the model's `make_cache` returns;
layers that read another one's cache follow after them, and blocks without any cache are left out.
Where mlx-lm keeps a recurrent state beside the KV cache of one layer, in a CacheList, it is one layer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from daemon.errors import PolicyError
from daemon.policy.patterns import layer_kinds
from daemon.policy.reader import Reader
from daemon.policy.rules import Architectures, Batching, Dims, Family, Ref, architectures
from daemon.policy.rules import LayerKind as LayerKind

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_query_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_DIM = ("head_dim", "head_size")
_HIDDEN = ("hidden_size", "d_model", "dim", "model_dim", "n_embd", "hidden_dim")
_CONTEXT = (
    "max_position_embeddings", "n_positions", "model_max_length", "max_seq_len", "max_sequence_length",
    "seq_length", "n_ctx", "block_size",
)  # fmt: skip
_VOCAB = ("vocab_size", "num_vocab")
_MULTIMODAL_KEYS = ("vision_config", "audio_config", "image_token_id", "audio_token_id")

_MOST_LAYERS = 4096  # far above any model; a wrong number must not fill the memory
_ALONE = "mlx-lm runs one sequence of this model at a time: max_concurrent counts as 1"
_NO_CONTEXT = "config.json does not say how long the context may be"

_LATENT = Dims(kv_heads=1, head_dim="kv_lora_rank", head_dim_v="qk_rope_head_dim")
_EXPANDED = Dims(
    kv_heads="heads", head_dim=("qk_nope_head_dim", "qk_rope_head_dim"), head_dim_v="v_head_dim"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer caches: *n_kv_heads* keys of *head_dim_k* and values of *head_dim_v* a token.

    A latent layer's "key" is the compressed vector and its "value" the rotary key. *window* is in
    tokens (sliding, chunked); *source* is the layer whose cache a shared layer reads; *indexer_dim*
    counts further 16-bit values a token that a sparse-attention indexer keeps.
    """

    index: int
    kind: LayerKind
    n_kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    window: int | None = None
    source: int | None = None
    indexer_dim: int = 0

    @property
    def grows(self) -> bool:
        """Whether the layer keeps something of every token."""
        return self.kind in (LayerKind.FULL, LayerKind.LATENT)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a KV policy needs to know of a model.

    *family* is mlx-lm's module; *n_heads* counts query heads, of the first layer where layers differ.
    *stock_cache* says why the model must keep mlx-lm's own cache, if it
    must; *batching* says how several sequences may run together; *boundary_k* is the number of boundary layers whose keys need 8 bits. *notes* tell which
    values were assumed and what else a user should know.
    """

    model_type: str
    family: str
    layers: tuple[Layer, ...]
    n_heads: int
    max_context: int | None
    vocab_size: int | None
    stock_cache: str | None = None
    batching: Batching = "rows"
    boundary_k: int = 0
    learned_sinks: bool = False
    notes: tuple[str, ...] = ()

    @property
    def eligible(self) -> tuple[int, ...]:
        """The indices of the layers that may be quantized, in order."""
        if self.stock_cache is not None:
            return ()
        return tuple(layer.index for layer in self.layers if layer.kind is LayerKind.FULL)


def read_architecture(config: Mapping[str, object]) -> Architecture:
    """Return the architecture that *config*, the content of a config.json, describes.

    Raises:
        PolicyError: mlx-lm has no text model of that type, or a key that decides something is
            missing or wrong.
    """
    rules = architectures()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise PolicyError("", 'config.json has no "model_type"')
    name = rules.family_of(model_type, _names(config.get("architectures")))
    if name is None:
        raise _unsupported(model_type, config, rules)
    name, family, text = _inner(name, config, rules)
    reader = Reader(text, family.defaults)
    layers = _layers(family, reader)
    attends = any(layer.n_kv_heads for layer in layers)
    sinks = family.learned_sinks
    context = reader.first(*_CONTEXT)
    notes = [
        *reader.notes,
        *([family.note] if family.note else []),
        *([_ALONE] if family.batching == "alone" else []),
        *([_NO_CONTEXT] if attends and context is None else []),
    ]
    return Architecture(
        model_type=model_type,
        family=name,
        layers=layers,
        n_heads=_heads(family.dims, reader, 0) if attends else 0,
        max_context=context,
        vocab_size=reader.first(*_VOCAB) or Reader(config, {}).first(*_VOCAB),
        stock_cache=family.stock,
        batching=family.batching,
        boundary_k=family.boundary_k,
        learned_sinks=sinks if isinstance(sinks, bool) else any(bool(text.get(k)) for k in sinks),
        notes=tuple(notes),
    )


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _unsupported(
    model_type: str, config: Mapping[str, object], rules: Architectures
) -> PolicyError:
    """Return the refusal of a model that mlx-lm has no text model for."""
    if model_type in rules.multimodal or any(key in config for key in _MULTIMODAL_KEYS):
        return PolicyError(
            "",
            f'"{model_type}" is a vision or audio model, refused until mlx-vlm is integrated',
            hint="use a text model; mlx-lm also runs the text part of gemma3, mistral3 or qwen3_vl",
        )
    known = [*rules.families, *rules.aliases, *rules.spellings]
    close = difflib.get_close_matches(model_type, known, n=3)
    return PolicyError(
        "",
        f'mlx-lm {rules.mlx_lm} has no model of type "{model_type}"',
        hint=f"the nearest names are {', '.join(close)}" if close else None,
    )


def _inner(
    name: str, config: Mapping[str, object], rules: Architectures
) -> tuple[str, Family, Mapping[str, object]]:
    """Return the family and the keys that describe the language model inside *config*.

    What the outer family says itself wins, and its name stays: it is what mlx-lm loads.
    """
    family = rules.families[name]
    text: Mapping[str, object] = config
    if family.text is not None:
        nested = config.get("text_config")
        if isinstance(nested, Mapping):
            text = {**config, **nested} if family.text == "merged" else nested
        elif family.text == "required":
            raise PolicyError("", f'config.json of a {name} model has no "text_config"')
    match family.inner:
        case None:
            return name, family, text
        case str(inner):
            chosen = rules.families[inner]
        case by_type:
            text_type = text.get("model_type")
            chosen = rules.families[by_type.get(str(text_type), by_type["*"])]
    said = {field: getattr(family, field) for field in family.model_fields_set}
    said["defaults"] = chosen.defaults | family.defaults
    return name, chosen.model_copy(update=said), text


def _layers(family: Family, reader: Reader) -> tuple[Layer, ...]:
    n_layers = reader.first(*_LAYERS)
    if n_layers is not None and n_layers > _MOST_LAYERS:
        raise PolicyError("", f"config.json describes {n_layers} layers; more than {_MOST_LAYERS}")
    blocks = layer_kinds(family.layers, reader, n_layers)
    kinds = [LayerKind.LATENT if _is_latent(kind, family) else kind for kind in blocks]
    own = len(kinds) - (reader.number(family.shared) if family.shared else 0)
    layers = [Layer(index, kind) for index, kind in enumerate(family.prefix)]
    last_of: dict[LayerKind, int] = {}
    for block, kind in enumerate(kinds):
        if kind is None:
            continue
        index = len(layers)
        if block >= own:
            if kind not in last_of:
                raise PolicyError("", f"layer {block} reads a {kind} cache, but no layer holds one")
            layers.append(Layer(index, LayerKind.SHARED, source=last_of[kind]))
            continue
        last_of[kind] = index
        layers.append(_layer(index, block, kind, family, reader))
    if not layers:
        raise PolicyError("", "config.json describes a model without layers that cache anything")
    return tuple(layers)


def _is_latent(kind: LayerKind | None, family: Family) -> bool:
    return kind is LayerKind.FULL and family.attention == "latent"


def _layer(index: int, block: int, kind: LayerKind, family: Family, reader: Reader) -> Layer:
    if kind is LayerKind.RECURRENT:
        return Layer(index, kind)
    window = None
    if kind in (LayerKind.SLIDING, LayerKind.CHUNKED):
        if family.window is None:
            raise PolicyError("", f"layer {block} is {kind}, but its family has no window")
        window = reader.count(family.window)
    dims = _dims(family, kind, reader)
    heads = _heads(dims, reader, block)
    head_dim_k = _head_dim(dims.head_dim, dims, reader, block)
    return Layer(
        index=index,
        kind=kind,
        n_kv_heads=_kv_heads(dims, heads, reader, block),
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_k
        if dims.head_dim_v is None
        else _head_dim(dims.head_dim_v, dims, reader, block),
        window=window,
        indexer_dim=2 * reader.count(family.indexer) if family.indexer else 0,
    )


def _dims(family: Family, kind: LayerKind, reader: Reader) -> Dims:
    """Merge what holds for every layer with what holds for layers of *kind*; missing keys do not count."""
    preset = {"dense": Dims(), "latent": _LATENT, "expanded": _EXPANDED}[family.attention]
    merged = {**_given(preset), **_given(family.dims)}
    for override in family.sliding if kind is LayerKind.SLIDING else family.full:
        if override.when is None or reader.get(override.when):
            given = _given(override)
            merged |= {name: ref for name, ref in given.items() if _present(ref, reader)}
    return Dims(**merged)


def _given(dims: Dims) -> dict[str, Ref]:
    return dims.model_dump(exclude={"when"}, exclude_none=True)


def _present(ref: Ref, reader: Reader) -> bool:
    return not isinstance(ref, str) or ref in ("heads", "derived") or reader.get(ref) is not None


def _resolve(ref: Ref, reader: Reader, block: int) -> int:
    match ref:
        case int():
            return ref
        case str():
            return reader.count(ref, block)
        case keys:
            return sum(reader.number(key, block) for key in keys)


def _heads(dims: Dims, reader: Reader, block: int) -> int:
    if dims.heads is not None:
        return _resolve(dims.heads, reader, block)
    return reader.first(*_HEADS, layer=block) or 0


def _kv_heads(dims: Dims, heads: int, reader: Reader, block: int) -> int:
    if dims.kv_group is not None:
        return -(-heads // reader.count(dims.kv_group, block))
    if dims.kv_heads == "heads":
        return heads
    if dims.kv_heads is not None:
        return _resolve(dims.kv_heads, reader, block)
    return reader.first(*_KV_HEADS, layer=block) or heads


def _head_dim(ref: Ref | None, dims: Dims, reader: Reader, block: int) -> int:
    if ref is not None and ref != "derived":
        return _resolve(ref, reader, block)
    written = None if ref == "derived" else reader.first(*_HEAD_DIM)
    if written is not None:
        return written
    heads, hidden = _heads(dims, reader, block), reader.first(*_HIDDEN)
    if not heads or not hidden:
        lacking = _HEADS[0] if not heads else _HIDDEN[0]
        raise PolicyError("", f'config.json lacks "{lacking}": the length of a head is unknown')
    return hidden // heads
