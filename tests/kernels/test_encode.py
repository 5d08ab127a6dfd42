"""Encoding into tiles: in plain mx, and by Metal's kernel on a CPU emulation of Metal's language."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from daemon.kernels import codec, encode, metal, packing
from daemon.kernels.backend import Choice
from daemon.kernels.cuda import rounding
from daemon.kernels.packing import TileLayout
from daemon.kernels.rotation import Side
from daemon.policy.schemes import SCHEMES, Codec
from tests.kernels.emulated_metal import emulated
from tests.metalshim.launch import ORDERS
from tests.metalshim.needed import needs_shim

Coded = tuple[mx.array, mx.array] | None


def layout_of(scheme: str, dim_k: int = 64, dim_v: int = 64) -> TileLayout:
    kinds = SCHEMES[scheme]
    return TileLayout(kinds.k, kinds.v, dim_k, dim_v)


def vectors(
    layout: TileLayout, count: int, dtype: mx.Dtype = mx.float32, seed: int = 0
) -> tuple[mx.array | None, mx.array | None]:
    keys = mx.random.split(mx.random.key(seed))
    k, v = (
        (3 * mx.random.normal((2, count, dim), key=key)).astype(dtype) if kind.scaled else None
        for kind, dim, key in zip(
            (layout.k, layout.v), (layout.dim_k, layout.dim_v), keys, strict=True
        )
    )
    return k, v


def test_tokens_lie_in_their_slots_and_the_others_are_zero() -> None:
    layout = layout_of("turbo4v3")
    k, v = vectors(layout, 70)
    assert k is not None
    assert v is not None

    got = packing.unpack(encode.tiles(k, v, layout, first=5, old=None), layout)

    for side, x, kind, name in ((got.k, k, layout.k, "k"), (got.v, v, layout.v, "v")):
        assert side is not None
        codes, scales = codec.encode(x, kind, name)  # type: ignore[arg-type] # k or v
        expected = mx.pad(codes, [(0, 0), (5, 21), (0, 0)])
        assert mx.array_equal(side[0], expected).item()
        assert mx.array_equal(side[1], mx.pad(scales, [(0, 0), (5, 21)])).item()


def test_tokens_before_the_first_slot_are_kept_from_the_old_tile() -> None:
    layout = layout_of("turbo3v2")
    k, v = vectors(layout, 40)
    assert k is not None
    assert v is not None
    whole = encode.tiles(k, v, layout, first=0, old=None)

    old = encode.tiles(k[:, :13], v[:, :13], layout, first=0, old=None)
    rest = encode.tiles(k[:, 13:], v[:, 13:], layout, first=13, old=old)

    assert mx.array_equal(rest, whole).item()


def test_without_metal_the_reference_encodes() -> None:
    assert encode.choice(layout_of("turbo4v4")).backend == "reference"


METAL = [
    ("turbo4v4", 128, 128, mx.float16),
    ("turbo8v3", 80, 128, mx.bfloat16),
    ("turbo3.5v3.5", 80, 96, mx.float32),
    ("turbo5v2", 64, 256, mx.float16),
    ("turbo2v8", 192, 128, mx.float32),
    ("turbo0v4", 64, 64, mx.float32),
    ("turbo3v0", 80, 80, mx.bfloat16),
    ("turbo3tv3t", 64, 128, mx.float16),
    ("turbo4v3t", 64, 80, mx.float32),
]


def assert_equivalent(
    ours: tuple[mx.array, mx.array],
    theirs: tuple[mx.array, mx.array],
    x: mx.array,
    kind: Codec,
    side: Side,
    first: int,
) -> None:
    """Bits equal, except where the order of a sum decides: codes at one angle, scales between two numbers of 16 bits."""
    differ = np.array(mx.any(ours[0] != theirs[0], axis=-1))
    same = ~differ
    np.testing.assert_allclose(ulps(ours[1])[same], ulps(theirs[1])[same], atol=1)
    assert differ.mean() < 0.02
    z = np.array(codec.rotate(x, kind, side), dtype=np.float64)
    for head, slot in np.argwhere(differ):
        angles = []
        for codes, scales in (ours, theirs):
            c = np.array(codec.decode(codes, scales, kind)[0][head, slot], dtype=np.float64)
            vector = z[head, slot - first]
            angles.append((vector @ c) / np.linalg.norm(vector) / np.linalg.norm(c))
        assert abs(angles[0] - angles[1]) < 1e-6


def ulps(scales: mx.array) -> np.ndarray:
    return np.array(scales).view(np.int16).astype(int)


@needs_shim
@pytest.mark.parametrize(("scheme", "dim_k", "dim_v", "dtype"), METAL)
def test_metal_packs_what_the_reference_packs(
    scheme: str, dim_k: int, dim_v: int, dtype: mx.Dtype
) -> None:
    layout = layout_of(scheme, dim_k, dim_v)
    for count, first in ((1, 0), (31, 4), (32, 0), (33, 40), (70, 13)):
        k, v = vectors(layout, count, dtype, seed=count)
        before = vectors(layout, first, dtype, seed=99) if first == 13 else None
        old = None if before is None else encode.encoded(*before, layout, first=0, old=None)

        with emulated("check") as settings:
            made = metal.tiles(k, v, layout, first=first, old=old)
        got = packing.unpack(made, layout)
        expected = packing.unpack(encode.encoded(k, v, layout, first=first, old=old), layout)

        assert all(not any(done.unwritten.values()) for _, done in settings.launches)
        sides: list[tuple[Coded, Coded, mx.array | None, Side]]
        sides = [(got.k, expected.k, k, "k"), (got.v, expected.v, v, "v")]
        for ours, theirs, x, side in sides:
            if x is None:
                continue
            assert ours is not None
            assert theirs is not None
            kind = layout.k if side == "k" else layout.v
            assert_equivalent(ours, theirs, x, kind, side, first)


@needs_shim
@pytest.mark.parametrize(("scheme", "dim_k", "dim_v", "dtype"), METAL[1:3])
def test_sums_in_another_order_decide_little_about_what_metal_packs(
    scheme: str, dim_k: int, dim_v: int, dtype: mx.Dtype
) -> None:
    layout = layout_of(scheme, dim_k, dim_v)
    k, v = vectors(layout, 70, dtype)
    assert k is not None
    assert v is not None

    with emulated("rough"):
        got = packing.unpack(metal.tiles(k, v, layout, first=4, old=None), layout)

    expected = packing.unpack(encode.encoded(k, v, layout, first=4, old=None), layout)
    for ours, theirs, x, kind, side in (
        (got.k, expected.k, k, layout.k, "k"),
        (got.v, expected.v, v, layout.v, "v"),
    ):
        assert ours is not None
        assert theirs is not None
        assert_equivalent(ours, theirs, x, kind, side, 4)  # type: ignore[arg-type] # k or v


@needs_shim
def test_metal_encodes_the_same_in_every_order_of_threads() -> None:
    layout = layout_of("turbo4v4")
    k, v = vectors(layout, 40)
    made = []
    for order in ORDERS:
        with emulated(order=order):
            made.append(np.array(metal.tiles(k, v, layout, first=4, old=None)))

    np.testing.assert_array_equal(made[0], made[1])
    np.testing.assert_array_equal(made[0], made[2])


BROKEN: dict[str, Callable[[np.ndarray], None]] = {
    "zero": lambda x: x.fill(0),
    "NaN": lambda x: x[0, 3].fill(np.nan),
    "infinite": lambda x: x[0, 3, :1].fill(np.inf),
    "huge": lambda x: x[0, 3].fill(3e36),
}


@needs_shim
@pytest.mark.parametrize("spoil", BROKEN.values(), ids=list(BROKEN))
@pytest.mark.parametrize("scheme", ["int8", "turbo4v4", "turbo3tv3t"])
def test_metal_stores_odd_vectors_as_the_reference_does(
    scheme: str, spoil: Callable[[np.ndarray], None]
) -> None:
    layout = layout_of(scheme)
    x = np.array(vectors(layout, 32)[0])
    spoil(x)
    k = v = mx.array(x)

    with emulated():
        got = packing.unpack(metal.tiles(k, v, layout, first=0, old=None), layout)
    expected = packing.unpack(encode.encoded(k, v, layout, first=0, old=None), layout)

    assert got.k is not None
    assert expected.k is not None
    np.testing.assert_array_equal(np.array(got.k[1]), np.array(expected.k[1]))
    others = np.arange(32) != 3
    np.testing.assert_array_equal(np.array(got.k[0])[:, others], np.array(expected.k[0])[:, others])


@needs_shim
def test_on_metal_the_kernel_encodes_once_it_has_proved_itself() -> None:
    layout = layout_of("turbo4v2")
    k, v = vectors(layout, 32)
    with emulated() as settings:
        assert encode.choice(layout) == Choice("metal")
        before = len(settings.launches)
        encode.tiles(k, v, layout, first=0, old=None)

    assert len(settings.launches) == before + 1


@needs_shim
def test_a_kernel_that_disagrees_is_not_used_and_the_choice_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = layout_of("turbo4v2", 96)
    right = metal.tiles
    monkeypatch.setattr(metal, "tiles", lambda *given, **more: right(*given, **more) ^ 1)
    with emulated():
        choice = encode.choice(layout)

    assert choice.backend == "reference"
    assert choice.failed
    assert "disagree" in str(choice.reason)


@needs_shim
def test_a_layout_that_metal_does_not_write_goes_to_the_reference_with_a_reason() -> None:
    with emulated():
        choice = encode.choice(layout_of("turbo4v4", 40, 64))

    assert (choice.backend, choice.failed) == ("reference", False)
    assert choice.reason == "Metal kernels do not encode vectors of 40 values"


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A device that is CUDA's by name, whose rounding kernel answers by the codec."""
    monkeypatch.setattr(encode, "backend_of_device", lambda: "cuda")
    monkeypatch.setattr(rounding, "closest", lambda u, bits, _: codec.closest(u, bits))
    encode._choice.cache_clear()
    yield monkeypatch
    encode._choice.cache_clear()


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_a_kernel_rounds_what_no_kernel_encodes_whole() -> None:
    assert encode.choice(layout_of("turbo8v4", 80, 80)) == Choice("cuda")
    int8 = encode.choice(layout_of("int8", 80, 80))
    assert (int8.backend, int8.failed) == ("reference", False)
    assert "encode only what" in str(int8.reason)


def not_compiled(*_: object) -> tuple[mx.array, mx.array]:
    raise RuntimeError("[cuda] nvrtc: error: identifier is undefined")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (not_compiled, "fail to encode on this device (RuntimeError: [cuda] nvrtc: error"),
        (lambda u, bits, _: codec.closest(-u, bits), "disagree with the reference about codes"),
        (lambda u, bits, _: (codec.closest(u, bits)[0], mx.ones(u.shape[:-1])), "about scales"),
    ],
    ids=["does not compile", "codes", "overlap"],
)
def test_a_rounding_kernel_that_is_wrong_here_never_rounds(
    on_cuda: pytest.MonkeyPatch, broken: Callable[..., Any], reason: str
) -> None:
    layout = layout_of("turbo4v4", 80, 80)
    k, v = vectors(layout, 40)
    on_cuda.setattr(rounding, "closest", broken)

    choice = encode.choice(layout)
    made = encode.tiles(k, v, layout, first=3, old=None)

    assert (choice.backend, choice.failed) == ("reference", True)
    assert reason in str(choice.reason)
    assert mx.array_equal(made, encode.encoded(k, v, layout, first=3, old=None)).item()
