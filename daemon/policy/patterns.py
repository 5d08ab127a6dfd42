"""The closed set of layer patterns: from a rule of architectures.yaml to one kind per layer."""

from __future__ import annotations

from collections.abc import Sequence

from daemon.errors import PolicyError
from daemon.policy.reader import Reader
from daemon.policy.rules import (
    All,
    Blocks,
    EveryNth,
    LayerKind,
    LayerPattern,
    Listed,
    Passes,
    PeriodOffset,
    Words,
)

Kinds = list[LayerKind | None]


def layer_kinds(patterns: Sequence[LayerPattern], reader: Reader, n_layers: int | None) -> Kinds:
    """Return the kind of every block by the first pattern that applies; None: it caches nothing.

    *n_layers* None means that only a list of the config can tell.

    Raises:
        PolicyError: no pattern applies, or the config contradicts itself.
    """
    missing: list[str] = []
    for pattern in patterns:
        if any(bool(reader.get(key)) is not value for key, value in pattern.when.items()):
            continue
        if isinstance(pattern, Words | Listed | Blocks) and reader.get(pattern.key) is None:
            missing.append(pattern.key)
            continue
        return _apply(pattern, reader, n_layers)
    keys = " or ".join(f'"{key}"' for key in missing)
    raise PolicyError("", f"config.json lacks {keys}: the kinds of its layers are unknown")


def _apply(pattern: LayerPattern, reader: Reader, n_layers: int | None) -> Kinds:
    if isinstance(pattern, Words):
        return _words(pattern, reader, n_layers)
    if n_layers is None:
        raise PolicyError("", "config.json does not say how many layers the model has")
    match pattern:
        case All():
            return [pattern.kind] * n_layers
        case EveryNth():
            n = pattern.n if isinstance(pattern.n, int) else reader.count(pattern.n)
            rest = n_layers % n
            grouped: Kinds = [
                pattern.others if (i + 1) % n else pattern.nth for i in range(n_layers - rest)
            ]
            return grouped + [pattern.tail or pattern.others] * rest
        case PeriodOffset():
            period = reader.count(pattern.period)
            offset = period // 2 if pattern.offset == "half" else reader.number(pattern.offset)
            return [pattern.at if i % period == offset else pattern.others for i in range(n_layers)]
        case Listed():
            listed = {item - pattern.base for item in reader.integers(pattern.key)}
            return [pattern.listed if i in listed else pattern.others for i in range(n_layers)]
        case Blocks():
            blocks = reader.sequence(pattern.key)
            _check_length(pattern.key, len(blocks), n_layers)
            return [_block(block) for block in blocks[:n_layers]]
        case Passes():
            extra = reader.get(pattern.extra) if pattern.extra else None
            if isinstance(extra, list) and extra:
                times = len(extra) + 1
            else:
                times = reader.count(pattern.times) if pattern.times else 1
            return [kind for kind in pattern.kinds * times for _ in range(n_layers)]


def _words(pattern: Words, reader: Reader, n_layers: int | None) -> Kinds:
    words = [str(word) for word in reader.sequence(pattern.key)]
    if not words:
        raise PolicyError("", f'config.json: "{pattern.key}" is empty')
    if n_layers is None:
        n_layers = len(words)
    if pattern.cycle:
        words = [words[i % len(words)] for i in range(n_layers)]
    _check_length(pattern.key, len(words), n_layers)
    kinds: Kinds = []
    for word in words[:n_layers]:
        if word not in pattern.kinds and pattern.others is None:
            raise PolicyError(
                "",
                f'config.json: "{pattern.key}" has a layer of unknown kind "{word}"',
                hint=f"known are {', '.join(pattern.kinds)}",
            )
        kinds.append(pattern.kinds.get(word, pattern.others))
    return kinds


def _check_length(key: str, found: int, n_layers: int) -> None:
    """Refuse a list that is too short; longer ones describe layers that mlx-lm does not build (MTP)."""
    if found < n_layers:
        raise PolicyError(
            "", f'config.json: "{key}" has {found} entries for a model of {n_layers} layers'
        )


def _block(block: object) -> LayerKind | None:
    attention = block.get("attention") if isinstance(block, dict) else None
    if not isinstance(attention, dict):
        raise PolicyError("", 'config.json: a block of "block_configs" has no "attention"')
    if attention.get("no_op"):
        return None
    return LayerKind.RECURRENT if attention.get("replace_with_linear") else LayerKind.FULL
