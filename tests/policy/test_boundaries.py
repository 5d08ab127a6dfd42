from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.policy.boundaries import Boundaries, ends
from daemon.policy.schemes import FP16, INT8, SCHEMES, Codec, Scheme

eligible = st.lists(st.integers(0, 200), unique=True, max_size=60).map(sorted)
schemes = st.sampled_from(sorted(SCHEMES)).map(SCHEMES.__getitem__)


@given(eligible=eligible, count=st.integers(0, 100))
def test_ends_are_symmetric_by_rank_and_never_more_than_half(
    eligible: list[int], count: int
) -> None:
    ranks = {eligible.index(index) for index in ends(eligible, count)}
    assert ranks == {len(eligible) - 1 - rank for rank in ranks}
    assert len(ranks) == 2 * min(count, len(eligible) // 2)


@given(scheme=schemes, codec=st.sampled_from([INT8, FP16]), k=st.booleans(), v=st.booleans())
def test_a_boundary_never_lowers_anything(scheme: Scheme, codec: Codec, k: bool, v: bool) -> None:
    boundaries = Boundaries(codec, frozenset({0} if k else ()), frozenset({0} if v else ()))
    after, note = boundaries.raised(0, scheme)
    assert after.k.bits >= scheme.k.bits
    assert after.v.bits >= scheme.v.bits
    assert (note is None) == (after == scheme)


def test_fp16_and_int8_are_inert_even_for_an_fp16_boundary() -> None:
    boundaries = Boundaries(FP16, frozenset({0}), frozenset({0}))
    for name in ("fp16", "int8"):
        assert boundaries.raised(0, SCHEMES[name]) == (SCHEMES[name], None)


def test_both_sides_are_told_together() -> None:
    boundaries = Boundaries(INT8, frozenset({0}), frozenset({0}))
    assert boundaries.raised(0, SCHEMES["turbo4v3"]) == (SCHEMES["int8"], "K and V int8")
    assert boundaries.raised(1, SCHEMES["turbo4v3"]) == (SCHEMES["turbo4v3"], None)
