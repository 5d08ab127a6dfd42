from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from daemon.cache import container, state
from daemon.cache.alone import alone
from daemon.cache.latent import LatentCache
from daemon.cache.row import Row
from daemon.cache.sequence import BatchCache, SequenceCache
from daemon.cache.state import Identity
from daemon.errors import SnapshotError
from daemon.kernels.keys import KeyTransform
from daemon.policy.schemes import SCHEMES, parse_scheme

TOKENS = tuple((7 * i) % 997 for i in range(150))
IDENTITY = Identity(model="fingerprint", policy="hash", tokens=TOKENS)


def row_cache(scheme: str = "turbo8v4", **options: Any) -> SequenceCache:
    return SequenceCache(
        Row(parse_scheme(scheme), **{"sink_tokens": 4, "tail_tokens": 32, **options})
    )


def grow(cache: Any, count: int, *, seed: int = 0, dtype: mx.Dtype = mx.float32) -> None:
    for start in range(0, count, 40):
        n = min(40, count - start)
        keys = mx.random.normal((1, 2, n, 32), key=mx.random.key(seed + start)).astype(dtype)
        cache.update_and_fetch(keys, keys * 2)


def same(one: SequenceCache, other: SequenceCache) -> bool:
    a, b = one.row.export(), other.row.export()
    facts = [(s.length, s.dropped, s.packed_to, s.dim_k, s.dim_v, s.dtype_k) for s in (a, b)]
    return (
        facts[0] == facts[1]
        and a.arrays.keys() == b.arrays.keys()
        and all(mx.array_equal(a.arrays[name], b.arrays[name]) for name in a.arrays)
    )


@pytest.mark.parametrize("scheme", sorted({scheme.name for scheme in SCHEMES.values()}))
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_restored_row_goes_on_as_if_never_saved(
    scheme: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    """Every bit of what is stored, and of attention, now and after 60 more tokens."""
    cache = row_cache(scheme)
    grow(cache, 150, dtype=dtype)
    path = tmp_path / "one.safetensors"

    state.save(path, [cache], IDENTITY)
    (restored,) = state.restore(path, [row_cache(scheme)], IDENTITY)

    assert same(restored, cache)
    for step in range(2):
        q = mx.random.normal((1, 4, 1, 32), key=mx.random.key(9)).astype(dtype)
        assert mx.array_equal(restored.attend(q, 0.2, None, None), cache.attend(q, 0.2, None, None))
        for each in (restored, cache):
            grow(each, 60, seed=100 + step, dtype=dtype)
        assert same(restored, cache)


@pytest.mark.parametrize(
    "options",
    [
        {"sink_tokens": 0, "tail_tokens": 0},
        {"sink_tokens": 40, "tail_tokens": 64},
        {"token_budget": 128},
        {"sink_tokens": 200},
        {"statistics_id": "profile-1"},
    ],
)
@pytest.mark.parametrize("scheme", ["fp16", "turbo0v4", "turbo4v4"])
def test_sinks_tail_and_budget_come_back(
    scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    cache = row_cache(scheme, **options)
    grow(cache, 200)
    path = tmp_path / "one.safetensors"
    identity = Identity("m", "p", tuple(range(200)))

    state.save(path, [cache], identity)
    (restored,) = state.restore(path, [row_cache(scheme, **options)], identity)

    for each in (restored, cache):
        grow(each, 30, seed=5)
    assert same(restored, cache)
    assert restored.is_trimmable() == cache.is_trimmable()
    assert restored.row.statistics_id == options.get("statistics_id")


def test_keys_packed_by_statistics_come_back_with_the_statistics_of_that_name(
    tmp_path: Path,
) -> None:
    """A snapshot names the statistics and does not hold them: the empty cache brings them."""
    keys = KeyTransform(mx.full((2, 32), 2.0), mx.full((2, 32), 0.5), None)
    cache = row_cache(keys=keys, statistics_id="profile-1")
    grow(cache, 150)
    state.save(tmp_path / "named", [cache], IDENTITY)

    empty = row_cache(keys=keys, statistics_id="profile-1")
    (restored,) = state.restore(tmp_path / "named", [empty], IDENTITY)

    q = mx.random.normal((1, 4, 1, 32), key=mx.random.key(9))
    assert mx.array_equal(restored.attend(q, 0.2, None, None), cache.attend(q, 0.2, None, None))
    with pytest.raises(SnapshotError, match="statistics_id of cache 0 is profile-1, expected none"):
        state.restore(tmp_path / "named", [row_cache()], IDENTITY)
    nameless = row_cache(keys=keys)
    grow(nameless, 150)
    with pytest.raises(SnapshotError, match="statistics that have no id"):
        state.save(tmp_path / "x", [nameless], IDENTITY)


def test_the_whole_cache_of_a_model_continues_with_the_same_logits(
    tiny_llama: Any, make_caches: Any, tmp_path: Path
) -> None:
    """A boundary layer in full precision beside packed ones, as in a real policy."""

    def fresh() -> list[Any]:
        return [*make_caches("fp16")[:1], *make_caches("turbo8v4")[1:]]

    path = tmp_path / "prompt.safetensors"
    caches = fresh()
    tiny_llama(mx.array([TOKENS]), cache=caches)
    state.save(path, caches, IDENTITY)

    restored = state.restore(path, fresh(), IDENTITY)

    for token in (5, 6, 7):
        got, expected = (tiny_llama(mx.array([[token]]), cache=c) for c in (restored, caches))
        assert mx.array_equal(got, expected)


def test_mlx_lms_own_caches_are_saved_beside_ours(tmp_path: Path) -> None:
    def fresh() -> list[Any]:
        return [
            row_cache(),
            KVCache(),
            RotatingKVCache(max_size=64, keep=4),
            ArraysCache(2),
            CacheList(KVCache(), ArraysCache(1)),
        ]

    def step(caches: list[Any], count: int, seed: int) -> None:
        for cache in (*caches[:3], caches[4].caches[0]):
            grow(cache, count, seed=seed)
        caches[3][1] = mx.full((1, 3, 4), float(seed))
        caches[4].caches[1][0] = mx.ones((1, 5)).astype(mx.bfloat16)

    path = tmp_path / "mixed.safetensors"
    caches = fresh()
    step(caches, 150, 1)

    state.save(path, caches, IDENTITY)
    restored = state.restore(path, fresh(), IDENTITY)

    assert [type(cache) for cache in restored] == [type(cache) for cache in caches]
    assert restored[3][0] is None
    for extra in range(3):
        step(caches, 1, 50 + extra)
        step(restored, 1, 50 + extra)
    assert same(restored[0], caches[0])
    for mine, theirs in [(r, c) for r, c in zip(restored, caches, strict=True)][1:3]:
        assert mine.offset == theirs.offset
        for a, b in zip(mine.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert mx.array_equal(a, b)
    assert mx.array_equal(restored[3][1], caches[3][1])
    assert restored[4].caches[1][0].dtype == mx.bfloat16
    assert restored[4].caches[0].offset == 153


def test_latents_come_back_as_latents_and_as_nothing_else(tmp_path: Path) -> None:
    def empty(kind: type[SequenceCache]) -> SequenceCache:
        return kind(Row(parse_scheme("turbo8v0"), sink_tokens=4, tail_tokens=32))

    cache = empty(LatentCache)
    latents, rotary = (
        mx.random.normal((1, 1, 150, dim), key=mx.random.key(dim)) for dim in (32, 8)
    )
    cache.update_and_fetch(latents, rotary)
    path = tmp_path / "one.safetensors"
    state.save(path, [cache], IDENTITY)

    (restored,) = state.restore(path, [empty(LatentCache)], IDENTITY)

    assert type(restored) is LatentCache
    assert same(restored, cache)
    with pytest.raises(
        SnapshotError, match="kind of cache 0 is LatentCache, expected SequenceCache"
    ):
        state.restore(path, [empty(SequenceCache)], IDENTITY)


def test_the_cache_of_a_model_that_runs_alone_comes_back_as_one(tmp_path: Path) -> None:
    made, empty = ([alone(row_cache()), alone(KVCache())] for _ in range(2))
    for cache in made:
        grow(cache, 150)
    path = tmp_path / "one.safetensors"
    state.save(path, made, IDENTITY)

    restored = state.restore(path, empty, IDENTITY)

    assert [type(cache) for cache in restored] == [type(cache) for cache in made]
    assert restored[0].merge([restored[0]]) is restored[0]


def test_a_rotated_window_goes_on_where_it_was(tmp_path: Path) -> None:
    cache = RotatingKVCache(max_size=64, keep=4)
    for i in range(150):
        grow(cache, 1, seed=i)
    path = tmp_path / "window.safetensors"

    state.save(path, [cache], IDENTITY)
    (restored,) = state.restore(path, [RotatingKVCache(max_size=64, keep=4)], IDENTITY)

    for i in range(70):
        keys = mx.full((1, 2, 1, 32), float(i))
        got, expected = (c.update_and_fetch(keys, keys) for c in (restored, cache))
        assert mx.array_equal(got[0], expected[0])


def test_empty_caches_are_saved_too(tmp_path: Path) -> None:
    identity = Identity("m", "p", ())

    def fresh() -> list[Any]:
        return [row_cache(), KVCache(), RotatingKVCache(max_size=64), ArraysCache(2)]

    state.save(tmp_path / "empty", fresh(), identity)

    assert all(cache.empty() for cache in state.restore(tmp_path / "empty", fresh(), identity))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with one row and one rotating cache, of 150 tokens."""
    caches = [row_cache(), RotatingKVCache(max_size=256)]
    for cache in caches:
        grow(cache, 150)
    path = tmp_path / "saved.safetensors"
    state.save(path, caches, IDENTITY)
    return path


def fresh() -> list[Any]:
    return [row_cache(), RotatingKVCache(max_size=256)]


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (Identity("another", "hash", TOKENS), "model is fingerprint, expected another"),
        (Identity("fingerprint", "another", TOKENS), "policy is hash, expected another"),
        (Identity("fingerprint", "hash", TOKENS[:-1]), "n_tokens is 150, expected 149"),
        (Identity("fingerprint", "hash", (*TOKENS[:-1], 1)), "tokens is "),
    ],
)
def test_a_snapshot_of_another_model_policy_or_prompt_is_refused(
    identity: Identity, says: str, saved: Path
) -> None:
    with pytest.raises(SnapshotError) as caught:
        state.restore(saved, fresh(), identity)

    assert says in caught.value.message
    assert str(saved) in caught.value.message
    assert "delete the file" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("index", "cache", "says"),
    [
        (0, row_cache("turbo8v3t"), "scheme of cache 0 is turbo8v4, expected turbo8v3t"),
        (0, row_cache("turbo4v4"), "scheme of cache 0 is turbo8v4, expected turbo4v4"),
        (0, row_cache("fp16"), "scheme of cache 0 is turbo8v4, expected fp16"),
        (0, row_cache(sink_tokens=0), "sink_tokens of cache 0 is 4, expected 0"),
        (0, row_cache(tail_tokens=64), "tail_tokens of cache 0 is 32, expected 64"),
        (0, row_cache(fold_tokens=64), "fold_tokens of cache 0 is 32, expected 64"),
        (0, row_cache(token_budget=128), "token_budget of cache 0 is none, expected 128"),
        (0, row_cache(statistics_id="p"), "statistics_id of cache 0 is none, expected p"),
        (0, KVCache(), "kind of cache 0 is SequenceCache, expected KVCache"),
        (1, RotatingKVCache(max_size=512), "max_size of cache 1 is 256, expected 512"),
        (1, RotatingKVCache(max_size=256, keep=4), "keep of cache 1 is 0, expected 4"),
        (1, row_cache(), "kind of cache 1 is RotatingKVCache, expected SequenceCache"),
    ],
)
def test_a_row_of_another_policy_is_refused(index: int, cache: Any, says: str, saved: Path) -> None:
    empty = fresh()
    empty[index] = cache

    with pytest.raises(SnapshotError) as caught:
        state.restore(saved, empty, IDENTITY)

    assert says in caught.value.message
    assert all(each.empty() for each in empty)


def test_another_number_of_layers_is_refused(saved: Path) -> None:
    with pytest.raises(SnapshotError, match="number of caches is 2, expected 3"):
        state.restore(saved, [*fresh(), KVCache()], IDENTITY)


def tamper(path: Path, change: Callable[[dict[str, Any], dict[str, mx.array]], object]) -> None:
    """Write the file again as a program of another make would, with a checksum that is right."""
    description, arrays = container.read(path)
    change(description, arrays)
    container.write(path, description, arrays)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("layout", 0, "layout is 0, expected 1"),
        ("tile", 64, "tile is 64, expected 32"),
        ("rotation", 9, "rotation is 9, expected 7"),
        ("caches.0.scheme", "turbo4v4", "scheme of cache 0 is turbo4v4"),
        ("caches.0.v.codebook", "0" * 64, "codebook of v of cache 0 is 000"),
        ("caches.0.v.scale_rule", "matched", "scale_rule of v of cache 0 is matched"),
        ("caches.0.v.bits", 3.0, "bits of v of cache 0 is 3.0, expected 4"),
        ("caches.0.k.codec", "turbo8", "codec of k of cache 0 is turbo8, expected int8"),
        ("caches.0.length", 149, "cache 0 does not hold 150 tokens"),
        ("caches.0.packed_to", 96, "arrays are not those of a row"),
        ("caches.0.dropped", 32, "arrays are not those of a row"),
        ("caches.0.k.dim", 64, "arrays are not those of a row"),
        ("caches.0.k.dtype", "float16", "arrays are not those of a row"),
        ("caches.0.n_kv_heads", 4, "arrays are not those of a row"),
        ("caches.0.kind", "Pickle", "its description: caches.0: "),
        ("caches.0.length", "150", "its description: caches.0.SequenceCache.length"),
        ("caches.1.index", 4000, "cache 1 has"),
        ("extra", 1, "its description: extra"),
    ],
)
def test_a_file_of_another_build_is_refused_and_never_guessed(
    key: str, value: object, says: str, saved: Path
) -> None:
    def change(description: dict[str, Any], arrays: dict[str, mx.array]) -> None:
        *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        place: Any = description
        for part in path:
            place = place[part]
        place[last] = value

    tamper(saved, change)

    with pytest.raises(SnapshotError) as caught:
        state.restore(saved, fresh(), IDENTITY)
    assert says in caught.value.message


@pytest.mark.parametrize("name", ["0.tiles", "0.k_head", "1.keys"])
def test_a_missing_array_is_refused(name: str, saved: Path) -> None:
    tamper(saved, lambda _, arrays: arrays.pop(name))

    with pytest.raises(SnapshotError, match="damaged"):
        state.restore(saved, fresh(), IDENTITY)


def test_an_array_too_many_is_refused(saved: Path) -> None:
    tamper(saved, lambda _, arrays: arrays.update(more=mx.zeros(3)))

    with pytest.raises(SnapshotError, match="nothing uses its arrays more"):
        state.restore(saved, fresh(), IDENTITY)


def test_a_description_without_a_key_is_refused(saved: Path) -> None:
    tamper(saved, lambda description, _: description["caches"][0]["v"].pop("codebook"))

    with pytest.raises(SnapshotError, match=r"caches\.0\.SequenceCache\.v\.codebook"):
        state.restore(saved, fresh(), IDENTITY)


def test_a_cache_that_is_not_empty_is_no_place_to_restore_into(saved: Path) -> None:
    used = fresh()
    grow(used[0], 3)

    with pytest.raises(ValueError, match="cache 0 to restore into is not empty"):
        state.restore(saved, used, IDENTITY)


def test_caches_of_other_tokens_are_not_saved(tmp_path: Path) -> None:
    cache = row_cache()
    grow(cache, 149)

    with pytest.raises(ValueError, match="cache 0 holds 149 tokens, not 150"):
        state.save(tmp_path / "x", [cache], IDENTITY)


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (BatchCache([]), "cache 0 is a BatchCache, which a snapshot cannot hold"),
        (ChunkedKVCache(64), "cache 0 is a ChunkedKVCache"),
        (ArraysCache(1, left_padding=[3]), "padded prefill"),
    ],
)
def test_what_cannot_be_saved_is_refused(cache: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=says):
        state.save(tmp_path / "x", [cache], IDENTITY)
    assert not list(tmp_path.iterdir())


def test_several_sequences_are_refused(tiny_llama: Any, tmp_path: Path) -> None:
    caches = make_prompt_cache(tiny_llama)
    tiny_llama(mx.array([TOKENS, TOKENS]), cache=caches)

    with pytest.raises(SnapshotError, match="cache 0 holds 2 sequences"):
        state.save(tmp_path / "x", caches, IDENTITY)


# the file itself


@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "flip.safetensors"
    cache = row_cache("turbo4v4")
    grow(cache, 70)
    identity = Identity("m", "p", tuple(range(70)))
    state.save(path, [cache], identity)
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)

    with pytest.raises(SnapshotError):
        state.restore(path, [row_cache("turbo4v4")], identity)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1])
def test_a_truncated_file_is_refused(keep: int, saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])

    with pytest.raises(SnapshotError, match="damaged"):
        state.restore(saved, fresh(), IDENTITY)


@pytest.mark.parametrize("content", [b"not a cache", b"\xff" * 100, b"\0" * 64])
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)

    with pytest.raises(SnapshotError, match="damaged"):
        state.restore(path, fresh(), IDENTITY)


def test_something_appended_is_found(saved: Path) -> None:
    with saved.open("ab") as file:
        file.write(b"\0")

    with pytest.raises(SnapshotError, match="bytes of arrays"):
        state.restore(saved, fresh(), IDENTITY)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"format": "tqd-kv", "version": "2"}, "of version 2; this build reads version 1"),
        ({"format": "tqd-kv", "version": "0"}, "of version 0; this build reads version 1"),
        ({"format": "mlx", "version": "1"}, 'of format "mlx"'),
        ({"format": "tqd-kv"}, "no tqd-kv header"),
        ({"format": "tqd-kv", "version": "1"}, "header is not as it was written"),
    ],
)
def test_another_format_or_version_says_so(
    metadata: dict[str, str], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    header = json.dumps({"__metadata__": metadata}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(SnapshotError, match=says):
        state.restore(path, fresh(), IDENTITY)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"cannot read .*: No such file"):
        state.restore(tmp_path / "none", fresh(), IDENTITY)


def test_a_file_is_private_and_leaves_nothing_beside_it(saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_failed_save_leaves_the_file_that_was_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(container.os, "fsync", full)
    cache = row_cache()
    grow(cache, 150, seed=3)

    with pytest.raises(SnapshotError, match=r"cannot write .*: No space left"):
        state.save(saved, [cache], IDENTITY)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_the_same_cache_makes_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        cache = row_cache()
        grow(cache, 150)
        state.save(tmp_path / name, [cache], IDENTITY)

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_safetensors_reader_finds_the_arrays(saved: Path) -> None:
    """The format is safetensors: MLX's own reader sees the same arrays and the description."""
    arrays, metadata = mx.load(str(saved), format="safetensors", return_metadata=True)
    description, ours = container.read(saved)

    assert json.loads(metadata["description"]) == description
    assert arrays.keys() == ours.keys()
    assert all(mx.array_equal(arrays[name], ours[name]) for name in ours)
    assert description["caches"][0]["v"]["codec"] == "turbo4"
