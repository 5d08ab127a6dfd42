"""Save the caches of one sequence to a file, and restore them or refuse: nothing is ever guessed.

A snapshot says everything about itself: how each vector is stored (scheme, codecs, codebooks, scale
rule, rotation and layout versions, statistics), where each token is (sinks, tail, budget, offsets),
and what it belongs to (model, policy, tokens). It is restored into the place of empty caches that the
present model and policy made; a difference in any of this is a SnapshotError that says what differs.
Tiles are in the canonical order of ADR 0005. A restored cache goes on exactly as if never saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from pydantic import ValidationError

from daemon.cache import container
from daemon.cache.alone import like, plain_class
from daemon.cache.facts import (
    ArraysFacts,
    CacheFacts,
    Facts,
    GrowingFacts,
    ListFacts,
    RotatingFacts,
    RowFacts,
    SideFacts,
    Snapshot,
    flat,
    row_facts,
)
from daemon.cache.latent import LatentCache
from daemon.cache.sequence import SequenceCache
from daemon.cache.side import RowState
from daemon.errors import SnapshotError

Arrays = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a snapshot belongs to: the fingerprint of a model, the hash of a policy, and the tokens it has seen."""

    model: str
    policy: str
    tokens: tuple[int, ...]


def save(path: Path, caches: Sequence[Any], identity: Identity) -> None:
    """Write *caches*, one sequence's in the model's order, to *path*.

    Raises:
        SnapshotError: a cache is of a kind that snapshots cannot hold, or the file cannot be written.
        ValueError: a cache holds another number of tokens than *identity*.
    """
    arrays: Arrays = {}
    described = tuple(_described(cache, f"{i}", arrays) for i, cache in enumerate(caches))
    n_tokens = len(identity.tokens)
    for place, facts in flat(described):
        length = getattr(facts, "length", n_tokens)
        if length != n_tokens:
            raise ValueError(f"cache {place} holds {length} tokens, not {n_tokens}")
    container.write(path, _snapshot(identity, described).model_dump(mode="json"), arrays)


def restore(path: Path, empty: Sequence[Any], identity: Identity) -> list[Any]:
    """Return the caches saved at *path*, each like the one of *empty* in its place; *empty* itself stays as it is.

    Raises:
        SnapshotError: there is no such file, it is damaged, or anything of it differs from *empty* or *identity*.
        ValueError: a cache of *empty* is not empty.
    """
    description, arrays = container.read(path)
    try:
        found = Snapshot.model_validate(description)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise container.damaged(path, f"its description: {where}: {problem['msg']}") from error
    _compare(path, "", _snapshot(identity, found.caches), found)
    if len(empty) != len(found.caches):
        raise _differs(path, "number of caches", len(empty), len(found.caches))
    for place, facts in flat(found.caches):
        if getattr(facts, "length", found.n_tokens) != found.n_tokens:
            raise container.damaged(path, f"cache {place} does not hold {found.n_tokens} tokens")
    source = _Source(path, arrays)
    caches = [
        like(cache, source.restored(cache, facts, f"{i}"))
        for i, (cache, facts) in enumerate(zip(empty, found.caches, strict=True))
    ]
    if arrays:
        raise container.damaged(path, f"nothing uses its arrays {', '.join(sorted(arrays))}")
    return caches


def _snapshot(identity: Identity, caches: tuple[CacheFacts, ...]) -> Snapshot:
    ids = np.array(identity.tokens, dtype="<i8")
    return Snapshot(
        model=identity.model,
        policy=identity.policy,
        n_tokens=len(identity.tokens),
        tokens=hashlib.sha256(ids.tobytes()).hexdigest(),
        caches=caches,
    )


def _described(cache: Any, place: str, arrays: Arrays) -> CacheFacts:
    """Return what *cache* is, and put its arrays among *arrays* under names that begin with *place*."""
    facts, own = _DESCRIBE.get(plain_class(cache), _refused)(cache, place, arrays)
    arrays |= {f"{place}.{name}": array for name, array in own.items()}
    return facts


def _describe_row(cache: SequenceCache, place: str, arrays: Arrays) -> tuple[CacheFacts, Arrays]:
    row = cache.row
    if row.keys is not None and row.statistics_id is None:
        raise SnapshotError(f"cache {place} packs its keys by statistics that have no id")
    state = row.export()
    return row_facts(row, state, latent=isinstance(cache, LatentCache)), state.arrays


def _describe_growing(cache: KVCache, place: str, arrays: Arrays) -> tuple[CacheFacts, Arrays]:
    if cache.empty():
        return GrowingFacts(length=0), {}
    keys, values = cache.keys_and_values()
    return GrowingFacts(length=cache.offset), _single(keys, values, place)


def _describe_rotating(
    cache: RotatingKVCache, place: str, arrays: Arrays
) -> tuple[CacheFacts, Arrays]:
    facts = RotatingFacts(
        max_size=cache.max_size, keep=cache.keep, length=cache.offset, index=cache._idx
    )
    return facts, {} if cache.empty() else _single(cache.keys, cache.values, place)


def _describe_arrays(cache: ArraysCache, place: str, arrays: Arrays) -> tuple[CacheFacts, Arrays]:
    if cache.left_padding is not None or cache.lengths is not None:
        raise SnapshotError(f"cache {place} is in the middle of a padded prefill")
    held = {i: array for i, array in enumerate(cache.cache) if array is not None}
    facts = ArraysFacts(slots=len(cache.cache), present=tuple(held))
    return facts, {str(i): array for i, array in held.items()}


def _describe_list(cache: CacheList, place: str, arrays: Arrays) -> tuple[CacheFacts, Arrays]:
    inner = [_described(each, f"{place}.{i}", arrays) for i, each in enumerate(cache.caches)]
    return ListFacts(caches=tuple(inner)), {}


def _refused(cache: Any, place: str, arrays: Arrays) -> tuple[CacheFacts, Arrays]:
    raise SnapshotError(
        f"cache {place} is a {type(cache).__name__}, which a snapshot cannot hold",
        hint="a snapshot holds the caches of one sequence; extract it from a batch first",
    )


_DESCRIBE: Mapping[type, Callable[[Any, str, Arrays], tuple[CacheFacts, Arrays]]] = {
    SequenceCache: _describe_row,
    LatentCache: _describe_row,
    KVCache: _describe_growing,
    RotatingKVCache: _describe_rotating,
    ArraysCache: _describe_arrays,
    CacheList: _describe_list,
}


def _single(keys: mx.array, values: mx.array, place: str) -> Arrays:
    if keys.shape[0] != 1:
        raise SnapshotError(f"cache {place} holds {keys.shape[0]} sequences; a snapshot holds one")
    return {"keys": keys, "values": values}


class _Source:
    """A file that has been read; each array is handed out once."""

    def __init__(self, path: Path, arrays: Arrays) -> None:
        self._path = path
        self._arrays = arrays

    def restored(self, empty: Any, facts: CacheFacts, place: str) -> Any:
        """Return the cache that *facts* describe, in the place of *empty*."""
        kind = plain_class(empty).__name__
        if kind != facts.kind:
            raise _differs(self._path, f"kind of cache {place}", kind, facts.kind)
        if not isinstance(empty, CacheList) and not empty.empty():
            raise ValueError(f"cache {place} to restore into is not empty")
        match facts:
            case RowFacts():
                return self._row(empty, facts, place)
            case GrowingFacts():
                return self._growing(facts, place)
            case RotatingFacts():
                return self._rotating(empty, facts, place)
            case ArraysFacts():
                return self._recurrent(empty, facts, place)
            case ListFacts():
                return self._list(empty, facts, place)

    def _row(self, empty: SequenceCache, facts: RowFacts, place: str) -> SequenceCache:
        prefix = f"{place}."
        names = [name for name in self._arrays if name.startswith(prefix)]
        state = RowState(
            length=facts.length,
            dropped=facts.dropped,
            packed_to=facts.packed_to,
            n_kv_heads=facts.n_kv_heads,
            dim_k=facts.k.dim,
            dim_v=facts.v.dim,
            dtype_k=facts.k.dtype,
            dtype_v=facts.v.dtype,
            arrays={name.removeprefix(prefix): self._arrays.pop(name) for name in names},
        )
        latent = isinstance(empty, LatentCache)
        expected = row_facts(empty.row, state, latent=latent)
        _compare(self._path, f" of cache {place}", expected, facts)
        try:
            row = empty.row.restored(state)
            return LatentCache(row) if latent else SequenceCache(row)
        except ValueError as error:
            raise container.damaged(self._path, f"cache {place}: {error}") from error

    def _growing(self, facts: GrowingFacts, place: str) -> KVCache:
        cache = KVCache()
        if facts.length:
            keys, values = self._keys_and_values(place)
            if keys.shape[2] != facts.length:
                raise container.damaged(self._path, f"cache {place} has {keys.shape[2]} keys")
            cache.state = keys, values, facts.length
        return cache

    def _rotating(
        self, empty: RotatingKVCache, facts: RotatingFacts, place: str
    ) -> RotatingKVCache:
        expected = facts.model_copy(update={"max_size": empty.max_size, "keep": empty.keep})
        _compare(self._path, f" of cache {place}", expected, facts)
        cache = RotatingKVCache(max_size=facts.max_size, keep=facts.keep)
        if facts.length:
            keys, values = self._keys_and_values(place)
            if facts.index > keys.shape[2]:
                raise container.damaged(self._path, f"cache {place} has {keys.shape[2]} keys")
            cache.state = keys, values, facts.length, facts.keep, facts.max_size, facts.index
        return cache

    def _recurrent(self, empty: ArraysCache, facts: ArraysFacts, place: str) -> ArraysCache:
        if len(empty.cache) != facts.slots:
            raise _differs(self._path, f"slots of cache {place}", len(empty.cache), facts.slots)
        cache = ArraysCache(facts.slots)
        if any(slot >= facts.slots for slot in facts.present):
            raise container.damaged(self._path, f"cache {place} has a slot that it cannot have")
        for slot in facts.present:
            cache[slot] = self._take(f"{place}.{slot}")
        return cache

    def _list(self, empty: CacheList, facts: ListFacts, place: str) -> CacheList:
        if len(empty.caches) != len(facts.caches):
            raise _differs(
                self._path, f"caches of cache {place}", len(empty.caches), len(facts.caches)
            )
        pairs = zip(empty.caches, facts.caches, strict=True)
        return CacheList(
            *(self.restored(each, inner, f"{place}.{i}") for i, (each, inner) in enumerate(pairs))
        )

    def _keys_and_values(self, place: str) -> tuple[mx.array, mx.array]:
        keys, values = self._take(f"{place}.keys"), self._take(f"{place}.values")
        if not (keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3]):
            raise container.damaged(self._path, f"cache {place} has keys and values of two shapes")
        return keys, values

    def _take(self, name: str) -> mx.array:
        if name not in self._arrays:
            raise container.damaged(self._path, f'its array "{name}" is missing')
        return self._arrays.pop(name)


def _compare(path: Path, where: str, expected: Facts, found: Facts) -> None:
    """Refuse the file at *path* if any fact but its caches differs from what is *expected*."""
    for name in type(expected).model_fields:
        ours, theirs = getattr(expected, name), getattr(found, name)
        if isinstance(ours, SideFacts):
            _compare(path, f" of {name}{where}", ours, theirs)
        elif name != "caches" and ours != theirs:
            raise _differs(path, f"{name}{where}", ours, theirs)


def _differs(path: Path, what: str, expected: object, found: object) -> SnapshotError:
    return SnapshotError(
        f"{path} cannot be restored here: {what} is {_shown(found)}, expected {_shown(expected)}",
        hint="restore it with the model, policy and version it was saved with, or delete the file",
    )


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
