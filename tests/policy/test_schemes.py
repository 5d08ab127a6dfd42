from __future__ import annotations

import pytest

from daemon.policy.schemes import (
    ALIASES,
    CACHE_TYPES,
    FP16,
    KEY_CODEC_NAMES,
    SCHEMES,
    TURBO4,
    VALUE_CODEC_NAMES,
    Scheme,
    UnknownSchemeError,
    Window,
    parse_cache_type,
    parse_codec,
    parse_scheme,
    window_of,
)

K = ("0", "8", "5", "4", "3.5", "3t", "3", "2")
V = ("8", "4", "3.5", "3t", "3", "2", "0")


@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("v", V)
def test_every_pair_of_widths_is_a_scheme(k: str, v: str) -> None:
    scheme = parse_scheme(f"turbo{k}v{v}")

    assert scheme.name == {"turbo0v0": "fp16", "turbo8v8": "int8"}.get(
        f"turbo{k}v{v}", f"turbo{k}v{v}"
    )
    for codec, digit in ((scheme.k, k), (scheme.v, v)):
        assert codec.bits == (float(digit.rstrip("t")) or 16)
        assert codec.trellis is digit.endswith("t")


def test_every_canonical_name_means_itself() -> None:
    """A worker gets names and builds schemes from them: nothing may be lost on the way."""
    assert {parse_scheme(name).name for name in SCHEMES} == {
        scheme.name for scheme in SCHEMES.values()
    }
    for scheme in SCHEMES.values():
        assert Scheme(parse_codec(scheme.k.name, "k"), parse_codec(scheme.v.name, "v")) == scheme
        assert not scheme.mixed


def test_every_alias_means_a_canonical_scheme() -> None:
    assert {name for name in ALIASES.values() if SCHEMES[name].name != name} == set()
    assert parse_scheme("Turbo4-Delegated") == SCHEMES["turbo0v4"]
    assert parse_scheme("turbo3.5") == SCHEMES["turbo3v4"]


def test_values_have_no_5_bit_codec() -> None:
    assert KEY_CODEC_NAMES.keys() - VALUE_CODEC_NAMES.keys() == {"turbo5"}
    with pytest.raises(UnknownSchemeError, match='unknown codec "turbo5" for v'):
        parse_codec("turbo5", "v")


# bits of one side and compression of the pair, published sizes and exact arithmetic
@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        ("turbo5v4", 64, 4.75),
        ("turbo3.5v3.5", 64, 3.75),
        ("turbo3.5v3.5", 128, 3.625),
        ("turbo4v3.5", 64, 4.0),
        ("turbo3v3", 80, 3.2),
        ("turbo3tv3t", 80, 3.2),
        ("affine8", 64, 8.5),
        ("affine8", 128, 8.5),
        ("affine8", 96, 9.0),
        ("affine4", 128, 4.5),
        ("affine4", 32, 5.0),
        ("turbo0v3.5", 128, 9.8125),
        ("fp16", 80, 16),
    ],
)
def test_bits_per_value_are_exact(name: str, head_dim: int, bits: float) -> None:
    assert SCHEMES[name].bits_per_value(head_dim, head_dim) == bits


@pytest.mark.parametrize(
    ("name", "head_dim", "fits"),
    [
        ("affine8", 64, True),
        ("affine4", 96, True),
        ("affine4", 80, False),
        ("affine8", 112, False),
        ("turbo3.5v3.5", 80, True),
        ("turbo3.5v3.5", 63, False),
        ("turbo3v3", 63, True),
        ("turbo3tv3t", 112, True),
        ("turbo3tv3t", 60, False),
        ("fp16", 63, True),
    ],
)
def test_a_scheme_fits_vectors_of_whole_groups_pairs_and_eights(
    name: str, head_dim: int, fits: bool
) -> None:
    scheme = SCHEMES[name]

    assert scheme.fits(head_dim, 64) is fits
    assert scheme.fits(64, head_dim) is fits


def test_the_size_of_groups_that_there_are_not_is_refused() -> None:
    with pytest.raises(ValueError, match="affine8 stores groups of 32 values"):
        SCHEMES["affine8"].bits_per_value(80, 80)


def test_only_delegated_names_bring_a_window() -> None:
    names = {*SCHEMES, *ALIASES, *CACHE_TYPES}
    assert {name for name in names if window_of(name)} == {"turbo4-delegated"}
    assert window_of("Turbo4-Delegated") == Window(tail_tokens=256, fold_tokens=128)
    assert window_of(None) is None
    assert parse_cache_type("turbo4-delegated", "k") == FP16
    assert parse_cache_type("turbo4-delegated", "v") == TURBO4


@pytest.mark.parametrize("name", SCHEMES)
def test_keys_of_4_bits_or_fewer_are_low(name: str) -> None:
    keys = SCHEMES[name].k.name

    assert SCHEMES[name].low_bit_keys is (
        keys in ("turbo4", "turbo3.5", "trellis3", "turbo3", "turbo2", "affine4")
    )
