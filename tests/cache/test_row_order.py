"""Rows whose device keeps tiles in fragments, without that device."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from daemon.cache.row import Row
from daemon.kernels import order, packing, reference
from daemon.policy.schemes import SCHEMES


@pytest.fixture
def in_fragments(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Make rows believe in a Hopper GPU until the test takes it back."""
    packing.native_layout.cache_clear()
    monkeypatch.setattr(packing, "on_hopper", lambda: True)
    yield monkeypatch
    packing.native_layout.cache_clear()


def filled(scheme: str, dim: int, tokens: int) -> Row:
    row = Row(SCHEMES[scheme], sink_tokens=4, tail_tokens=32)
    k, v = (mx.random.normal((2, tokens, dim), key=mx.random.key(seed)) for seed in (1, 2))
    for start in range(0, tokens, 70):
        row.append(k[:, start : start + 70], v[:, start : start + 70])
    row.pack()
    return row


@pytest.mark.parametrize("scheme", ["turbo4v3", "int8", "turbo5v2"])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_a_row_exports_does_not_depend_on_the_order_of_its_tiles(
    scheme: str, dim: int, in_fragments: pytest.MonkeyPatch
) -> None:
    row = filled(scheme, dim, 200)
    exported = row.export()
    assert row.stored().layout.order == order.FRAGMENTS
    queries = mx.random.normal((4, 1, dim), key=mx.random.key(3))
    attended = reference.attend(queries, row.stored(), 0.1, None, None)

    in_fragments.undo()
    packing.native_layout.cache_clear()
    plain = filled(scheme, dim, 200)
    assert plain.stored().layout.order == order.CANONICAL
    expected = plain.export()
    assert set(exported.arrays) == set(expected.arrays)
    for name, array in expected.arrays.items():
        assert mx.array_equal(exported.arrays[name], array).item(), name
    assert mx.allclose(reference.attend(queries, plain.stored(), 0.1, None, None), attended).item()


def test_a_restored_row_has_its_tiles_in_the_order_of_its_device(
    in_fragments: pytest.MonkeyPatch,
) -> None:
    row = filled("turbo4v4", 64, 200)
    back = row.fresh().restored(row.export())
    assert back.stored().layout.order == order.FRAGMENTS
    assert mx.array_equal(back.stored().tiles_in_use(), row.stored().tiles_in_use()).item()


def test_what_the_tensor_cores_do_not_read_stays_canonical(
    in_fragments: pytest.MonkeyPatch,
) -> None:
    for scheme, dim in (("turbo0v4", 128), ("turbo4v3.5", 128), ("turbo4v4", 96)):
        assert filled(scheme, dim, 100).stored().layout.order == order.CANONICAL
